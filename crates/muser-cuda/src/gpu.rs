//! One card: driver context, stream, compiled kernels, memory. The only file that calls the driver.

use crate::device::CudaOptions;
use crate::many::{Gemm, SLOTS};
use crate::product::{Room, WIDE_ROOM};
use crate::sources::{HEADERS, Source, sources};
use crate::weights::Layout;
use cudarc::cublas::{CudaBlas, result as blas, sys as blas_sys};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr,
    PinnedHostSlice, ValidAsZeroBits, result, sys,
};
use cudarc::nvrtc::Ptx;
use muser_core::DeviceError;
use muser_format::DType;
use std::collections::HashMap;
use std::sync::Arc;

/// Device memory that is freed with its owner.
pub(crate) struct Memory {
    /// None where a pass is only described.
    slice: Option<CudaSlice<u8>>,
    /// Address on the card.
    pub ptr: u64,
}

impl Memory {
    /// What stands for memory where there is no card.
    pub fn nowhere() -> Self {
        Memory { slice: None, ptr: 256 }
    }

    fn bytes(&self) -> Result<&CudaSlice<u8>, DeviceError> {
        self.slice.as_ref().ok_or_else(no_memory)
    }

    fn bytes_mut(&mut self) -> Result<&mut CudaSlice<u8>, DeviceError> {
        self.slice.as_mut().ok_or_else(no_memory)
    }
}

fn no_memory() -> DeviceError {
    DeviceError::Backend("CUDA: a pass that was only described can't run; this is a defect of muser".into())
}

/// A page-locked buffer, and when what was sent from it has left. (The driver's wrapper notes that only where it tracks events.)
pub(crate) struct Pinned {
    memory: PinnedHostSlice<u8>,
    sent: CudaEvent,
}

impl Pinned {
    /// Waits until the buffer may be written.
    pub fn bytes(&mut self) -> Result<&mut [u8], DeviceError> {
        self.sent.synchronize().map_err(failed("wait for a copy"))?;
        self.memory.as_mut_slice().map_err(failed("write page-locked memory"))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A copy may still read it; an error shows at the next call.
        let _ = self.sent.synchronize();
    }
}

/// Page-locked memory that copies fill, or kernels by its address, and when that is done.
pub(crate) struct Received<T> {
    memory: PinnedHostSlice<T>,
    filled: CudaEvent,
}

impl<T: ValidAsZeroBits> Received<T> {
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// For kernels: cards see such memory at its own address.
    pub fn address(&self) -> Result<u64, DeviceError> {
        Ok(self.memory.as_ptr().map_err(failed("use page-locked memory"))? as u64)
    }

    /// Waits until nobody uses it, for words that kernels are to read.
    pub fn write(&mut self) -> Result<&mut [T], DeviceError> {
        self.filled.synchronize().map_err(failed("wait for the card"))?;
        self.memory.as_mut_slice().map_err(failed("write page-locked memory"))
    }

    /// Waits until it is filled.
    pub fn read(&self) -> Result<&[T], DeviceError> {
        self.filled.synchronize().map_err(failed("wait for the card"))?;
        self.memory.as_slice().map_err(failed("read page-locked memory"))
    }
}

impl<T> Drop for Received<T> {
    fn drop(&mut self) {
        // The card may still write it; an error shows at the next call.
        let _ = self.filled.synchronize();
    }
}

/// What decides the launches of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    /// Model of the card.
    pub name: String,
    /// Its multiprocessors and their shared memory.
    pub room: Room,
}

impl Card {
    /// The card that is described where there is none.
    pub fn h200() -> Self {
        Card {
            name: "NVIDIA H200 (no card was asked)".into(),
            room: Room { block: 232_448, processor: 233_472, processors: 132, wide: true },
        }
    }

    /// Card `index` of this machine, if it has one that muser can use.
    pub fn find(index: usize) -> Option<Self> {
        if !is_available() {
            return None;
        }
        Self::read(CudaContext::new(index).ok()?.as_ref()).ok()
    }

    fn read(context: &CudaContext) -> Result<Self, DeviceError> {
        let attribute = |a| context.attribute(a).map(|v| v as usize).map_err(failed("read an attribute"));
        use sys::CUdevice_attribute::*;
        let block = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let capability = (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let room = Room {
            block,
            wide: capability == (9, 0) && block >= WIDE_ROOM,
            processor: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            processors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        };
        Ok(Card { name: context.name().map_err(failed("read the card's name"))?, room })
    }
}

/// Where matrices are widened beside the products of the main stream: each slot is filled, multiplied, filled again.
struct Side {
    stream: Arc<CudaStream>,
    filled: [CudaEvent; SLOTS],
    multiplied: [CudaEvent; SLOTS],
}

impl Side {
    fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        let event = || context.new_event(None).map_err(failed("create an event"));
        Ok(Side {
            stream: context.new_stream().map_err(failed("create a stream"))?,
            filled: [event()?, event()?],
            multiplied: [event()?, event()?],
        })
    }
}

/// A card in use.
pub(crate) struct Gpu {
    context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    side: Side,
    kernels: HashMap<String, CudaFunction>,
    blas: CudaBlas,
    pub card: Card,
    programmatic: bool,
}

/// Any failure of the driver, with what was being done.
pub(crate) fn failed(what: &str) -> impl Fn(result::DriverError) -> DeviceError + '_ {
    move |e| DeviceError::Backend(format!("CUDA: {what}: {e}"))
}

/// Whether driver, compiler and a card are there.
pub fn is_available() -> bool {
    // SAFETY: only looks for the libraries.
    let libraries = unsafe {
        sys::is_culib_present()
            && cudarc::nvrtc::sys::is_culib_present()
            && cudarc::cublas::sys::is_culib_present()
    };
    libraries && CudaContext::device_count().is_ok_and(|n| n > 0)
}

impl Gpu {
    /// Opens a card and compiles the kernels for it, or takes them from where they are kept.
    pub fn open(
        options: &CudaOptions,
        types: &[DType],
        products: &[Vec<Layout>],
        chained: Option<&[Layout]>,
    ) -> Result<Self, DeviceError> {
        let (lane, cache) = (options.lane, options.cache.as_deref());
        // SAFETY: only looks for the libraries.
        let (driver, nvrtc, blas) = unsafe {
            (
                sys::is_culib_present(),
                cudarc::nvrtc::sys::is_culib_present(),
                cudarc::cublas::sys::is_culib_present(),
            )
        };
        if !driver {
            return Err(DeviceError::Backend(
                "no NVIDIA driver was found (libcuda); install it, or use --device cpu".into(),
            ));
        }
        if !nvrtc {
            return Err(DeviceError::Backend(
                "NVRTC was not found (libnvrtc); install the CUDA runtime compiler of version 12.8 or later, or use --device cpu"
                    .into(),
            ));
        }
        if !blas {
            return Err(DeviceError::Backend(
                "cuBLAS was not found (libcublas); install the CUDA toolkit's libraries, or use --device cpu"
                    .into(),
            ));
        }
        let context = CudaContext::new(options.index).map_err(failed("open the card"))?;
        // SAFETY: memory is used on one stream, but for the slots of widened matrices, which have events of their own.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("create a stream"))?;
        let attribute = |a| context.attribute(a).map_err(failed("read an attribute"));
        use sys::CUdevice_attribute::*;
        let major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(DeviceError::Backend(format!(
                "the card has compute capability {major}.{minor}; muser needs 8.0 (Ampere) or later: use --device cpu"
            )));
        }
        let card = Card::read(&context)?;
        let blas = CudaBlas::new(stream.clone())
            .map_err(|e| DeviceError::Backend(format!("cuBLAS does not start: {e:?}")))?;
        let shared_block = card.room.block as i32;
        let side = Side::new(&context)?;
        let mut gpu =
            Gpu { context, stream, side, kernels: HashMap::new(), blas, card, programmatic: major >= 9 };
        // Warpgroups' instructions belong to this architecture alone.
        let feature = if (major, minor) == (9, 0) { "a" } else { "" };
        let arch = format!("sm_{major}{minor}{feature}");
        let sources = sources(types, products, chained, lane, options.kv, gpu.card.room);
        let compile = |source: &Source| {
            let text = [&[source.defines.as_str()], HEADERS.as_slice(), &[source.text]].concat().join("\n");
            crate::nvrtc::cubin(&source.name, &text, &arch, lane, cache)
        };
        let binaries = std::thread::scope(|scope| {
            let compile = &compile;
            let workers: Vec<_> = sources.iter().map(|source| scope.spawn(move || compile(source))).collect();
            let stopped = |_| DeviceError::Backend("a thread that compiles kernels stopped".into());
            workers.into_iter().map(|w| w.join().map_err(stopped)?).collect::<Result<Vec<_>, DeviceError>>()
        })?;
        for (source, binary) in sources.iter().zip(binaries) {
            let module =
                gpu.context.load_module(Ptx::from_binary(binary)).map_err(failed("load a kernel module"))?;
            for (kernel, name) in &source.kernels {
                let function = module.load_function(kernel).map_err(failed("find a kernel"))?;
                if ["project", "chain", "stream", "stream_wide", "attend_rows", "attend_wide", "attend_few"]
                    .contains(kernel)
                    || kernel.starts_with("strict_project")
                {
                    let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    function
                        .set_attribute(most, shared_block)
                        .map_err(failed("allow a kernel its shared memory"))?;
                }
                gpu.kernels.insert(name.clone(), function);
            }
        }
        Ok(gpu)
    }

    /// A compiled kernel.
    pub fn kernel(&self, name: &str) -> Result<&CudaFunction, DeviceError> {
        self.kernels
            .get(name)
            .ok_or_else(|| DeviceError::Backend(format!("CUDA: kernel {name} is not compiled")))
    }

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.context.bind_to_thread().map_err(failed("bind the card"))?;
        let (free, total) = result::mem_get_info().map_err(failed("read free memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Zeroed memory.
    pub fn alloc(&self, bytes: usize) -> Result<Memory, DeviceError> {
        let slice = self.stream.alloc_zeros::<u8>(bytes.max(16)).map_err(failed("allocate memory"))?;
        let ptr = slice.device_ptr(&self.stream).0;
        Ok(Memory { slice: Some(slice), ptr })
    }

    /// Copies bytes to the card at an offset.
    pub fn upload(&self, to: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut view = to.bytes_mut()?.slice_mut(at..at + bytes.len());
        self.stream.memcpy_htod(bytes, &mut view).map_err(failed("copy to the card"))
    }

    /// Page-locked memory of the host.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        // SAFETY: bytes of any value are valid, and every one is written before it is read.
        let memory = unsafe { self.context.alloc_pinned_with_flags(bytes, 0) };
        let sent = self.context.new_event(None).map_err(failed("create an event"))?;
        Ok(Pinned { memory: memory.map_err(failed("lock pages of memory"))?, sent })
    }

    /// Page-locked memory for `len` words to come from the card.
    pub fn received<T: DeviceRepr>(&self, len: usize) -> Result<Received<T>, DeviceError> {
        // SAFETY: words of any bits are valid, and what was not written is not used.
        let memory = unsafe { self.context.alloc_pinned_with_flags(len, 0) };
        let filled = self.context.new_event(None).map_err(failed("create an event"))?;
        Ok(Received { memory: memory.map_err(failed("lock pages of memory"))?, filled })
    }

    /// Submits a copy that fills it, from offset `at` on.
    pub fn receive(&self, from: &Memory, at: usize, to: &mut Received<f32>) -> Result<(), DeviceError> {
        let address = from.bytes()?.slice(at..at + to.memory.num_bytes()).device_ptr(&self.stream).0;
        let words = to.memory.as_mut_slice().map_err(failed("write page-locked memory"))?;
        // SAFETY: the slice above was as long; who reads or frees the memory waits for the event that follows the copy.
        unsafe { result::memcpy_dtoh_async(words, address, self.stream.cu_stream()) }
            .map_err(failed("copy from the card"))?;
        self.fills(to)
    }

    /// Notes that it is filled when what was submitted is done.
    pub fn fills<T>(&self, to: &Received<T>) -> Result<(), DeviceError> {
        to.filled.record(&self.stream).map_err(failed("record an event"))
    }

    /// Submits a copy of the first `bytes` of a page-locked buffer.
    pub fn upload_pinned(
        &self,
        to: &mut Memory,
        at: usize,
        from: &mut Pinned,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let mut view = to.bytes_mut()?.slice_mut(at..at + bytes);
        let from_bytes = from.memory.as_slice().map_err(failed("read page-locked memory"))?;
        let (address, _used) = view.device_ptr_mut(&self.stream);
        // SAFETY: both ranges hold `bytes`; the buffer isn't written before the event that follows the copy (Pinned::bytes).
        unsafe { result::memcpy_htod_async(address, &from_bytes[..bytes], self.stream.cu_stream()) }
            .map_err(failed("copy to the card"))?;
        from.sent.record(&self.stream).map_err(failed("record an event"))
    }

    /// Copies bytes from the card and waits for them.
    pub fn download(&self, from: &Memory, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let view = from.bytes()?.slice(at..at + out.len());
        self.stream.memcpy_dtoh(&view, out).map_err(failed("copy from the card"))?;
        self.synchronize()
    }

    /// Copies within the card.
    pub fn copy(
        &self,
        from: &Memory,
        from_at: usize,
        to: &mut Memory,
        at: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let mut view = to.bytes_mut()?.slice_mut(at..at + bytes);
        self.stream
            .memcpy_dtod(&from.bytes()?.slice(from_at..from_at + bytes), &mut view)
            .map_err(failed("copy on the card"))
    }

    /// Waits for everything submitted.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.stream.synchronize().map_err(failed("wait for the card"))
    }

    /// Copies `bytes` from an address of the card and waits for them.
    pub fn download_at(&self, address: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.context.bind_to_thread().map_err(failed("bind the card"))?;
        // SAFETY: the caller names memory of this device that is long enough; `out` lives until the copy is done.
        unsafe { result::memcpy_dtoh_async(out, address, self.stream.cu_stream()) }
            .map_err(failed("copy from the card"))?;
        self.synchronize()
    }

    /// Launches a kernel; `args` are its parameters, each at most a few hundred bytes.
    pub fn launch(
        &self,
        kernel: &CudaFunction,
        grid: (u32, u32, u32),
        block: u32,
        shared: u32,
        args: &[Vec<u8>],
    ) -> Result<(), DeviceError> {
        self.launch_on(&self.stream, self.programmatic, kernel, grid, (block, shared), args)
    }

    /// `early`: it may start before the kernel ahead is done.
    fn launch_on(
        &self,
        stream: &CudaStream,
        early: bool,
        kernel: &CudaFunction,
        grid: (u32, u32, u32),
        (block, shared): (u32, u32),
        args: &[Vec<u8>],
    ) -> Result<(), DeviceError> {
        self.context.bind_to_thread().map_err(failed("bind the card"))?;
        let mut params: Vec<*mut std::ffi::c_void> = args.iter().map(|a| a.as_ptr() as *mut _).collect();
        // SAFETY: plain data; the fields that matter are set below.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream.cu_stream(),
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        // SAFETY: the parameters live until the call returns and match the kernel's signature: who names a kernel
        // builds its arguments beside the name; every address in them belongs to this device.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, kernel.cu_function(), params.as_mut_ptr(), std::ptr::null_mut())
        };
        code.result().map_err(failed("launch a kernel"))
    }

    /// Widens a matrix into a slot on the side, once what is multiplied from there is done.
    pub fn widen(
        &self,
        slot: usize,
        kernel: &CudaFunction,
        blocks: u32,
        args: &[Vec<u8>],
    ) -> Result<(), DeviceError> {
        let side = &self.side;
        side.stream.wait(&side.multiplied[slot]).map_err(failed("wait for an event"))?;
        self.launch_on(&side.stream, false, kernel, (blocks, 1, 1), (256, 0), args)?;
        side.filled[slot].record(&side.stream).map_err(failed("record an event"))
    }

    /// out (n x m) = `factor` times x (n x k, f16) times w (m x k, f16, a slot of widened matrices) transposed, on tensor cores.
    pub fn gemm(&self, gemm: &Gemm) -> Result<(), DeviceError> {
        let ((m, n, k), zero) = (gemm.shape, 0.0f32);
        let result = if gemm.half {
            blas_sys::cudaDataType_t::CUDA_R_16F
        } else {
            blas_sys::cudaDataType_t::CUDA_R_32F
        };
        self.stream.wait(&self.side.filled[gemm.slot]).map_err(failed("wait for an event"))?;
        use blas_sys::cublasOperation_t::*;
        // SAFETY: the three matrices have the stated shapes; many.rs sizes them.
        unsafe {
            blas::gemm_ex(
                *self.blas.handle(),
                CUBLAS_OP_T,
                CUBLAS_OP_N,
                m as i32,
                n as i32,
                k as i32,
                (&raw const gemm.factor).cast(),
                gemm.w as *const _,
                blas_sys::cudaDataType_t::CUDA_R_16F,
                k as i32,
                gemm.x as *const _,
                blas_sys::cudaDataType_t::CUDA_R_16F,
                k as i32,
                (&raw const zero).cast(),
                gemm.out as *mut _,
                result,
                gemm.stride as i32,
                blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                blas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        }
        .map_err(|e| DeviceError::Backend(format!("cuBLAS: {e:?}")))?;
        self.side.multiplied[gemm.slot].record(&self.stream).map_err(failed("record an event"))
    }
}
