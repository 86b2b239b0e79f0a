//! One card: driver context, stream, compiled kernels, memory. The only file that calls the driver.

use crate::weights::Layout;
use cudarc::cublas::{CudaBlas, result as blas, sys as blas_sys};
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, result, sys};
use cudarc::nvrtc::Ptx;
use muser_core::DeviceError;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// A program: its name, what is defined before it, its text, and its kernels by the names that launches use.
struct Source {
    name: String,
    defines: String,
    text: &'static str,
    kernels: Vec<(&'static str, String)>,
}

/// Programs that every model needs.
const COMMON: [(&str, &str, &[&str]); 2] = [
    (
        "norm",
        include_str!("kernels/norm.cu"),
        &[
            "embed",
            "rms_norm",
            "tail",
            "pick_features",
            "silu_mul",
            "silu_quantize",
            "scale_cap",
            "gather",
            "argmax",
        ],
    ),
    (
        "attend",
        include_str!("kernels/attend.cu"),
        &["qk_norm_rope_store", "attend_split", "attend_join", "attend_rows"],
    ),
];

/// All programs for a model with these layouts; each is compiled by a thread of its own.
fn sources(layouts: &[Layout]) -> Vec<Source> {
    let common = COMMON.iter().map(|(name, text, kernels)| Source {
        name: name.to_string(),
        defines: String::new(),
        text,
        kernels: kernels.iter().map(|k| (*k, k.to_string())).collect(),
    });
    let pairs = layouts.iter().flat_map(|layout| [1, 2, 4, 8].map(|columns| (*layout, columns)));
    let products = pairs.map(|(layout, columns)| {
        let of = |kernel: &str| format!("{kernel}_{}_{columns}", layout.name());
        let mut kernels = vec![("matvec_rows", of("matvec")), ("gate_up_rows", of("gate_up"))];
        if columns == 1 {
            kernels.push(("to_half", format!("to_half_{}", layout.name())));
        }
        Source {
            name: of("matvec"),
            defines: format!("#define TYPE {}\n#define COLUMNS {columns}", layout as i32),
            text: include_str!("kernels/matvec.cu"),
            kernels,
        }
    });
    common.chain(products).collect()
}

/// What every source begins with.
const HEADERS: [&str; 2] = [include_str!("kernels/common.cuh"), include_str!("kernels/dequant.cuh")];

/// Device memory that is freed with its owner.
pub(crate) struct Memory {
    slice: CudaSlice<u8>,
    /// Address on the card.
    pub ptr: u64,
}

/// A card in use.
pub(crate) struct Gpu {
    context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    kernels: HashMap<String, CudaFunction>,
    blas: Option<CudaBlas>,
    /// Model of the card.
    pub name: String,
    /// Multiprocessors.
    pub processors: usize,
    programmatic: bool,
}

/// Any failure of the driver, with what was being done.
pub(crate) fn failed(what: &str) -> impl Fn(result::DriverError) -> DeviceError + '_ {
    move |e| DeviceError::Backend(format!("CUDA: {what}: {e}"))
}

/// Whether driver, compiler and a card are there.
pub fn is_available() -> bool {
    // SAFETY: only looks for the libraries.
    let libraries = unsafe { sys::is_culib_present() && cudarc::nvrtc::sys::is_culib_present() };
    libraries && CudaContext::device_count().is_ok_and(|n| n > 0)
}

impl Gpu {
    /// Opens card `index` and compiles the kernels for it, or takes them from `cache`.
    pub fn open(index: usize, cache: Option<&Path>, layouts: &[Layout]) -> Result<Self, DeviceError> {
        // SAFETY: only looks for the libraries.
        let (driver, nvrtc) = unsafe { (sys::is_culib_present(), cudarc::nvrtc::sys::is_culib_present()) };
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
        let context = CudaContext::new(index).map_err(failed("open the card"))?;
        // SAFETY: this crate uses one stream, so nothing has to be ordered by events.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("create a stream"))?;
        let attribute = |a| context.attribute(a).map_err(failed("read an attribute"));
        use sys::CUdevice_attribute::*;
        let major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        if major < 8 {
            return Err(DeviceError::Backend(format!(
                "the card has compute capability {major}.{minor}; muser needs 8.0 (Ampere) or later: use --device cpu"
            )));
        }
        let name = context.name().map_err(failed("read the card's name"))?;
        // SAFETY: only looks for the library.
        let blas = unsafe { cudarc::cublas::sys::is_culib_present() }
            .then(|| CudaBlas::new(stream.clone()).ok())
            .flatten();
        let mut gpu = Gpu {
            context,
            stream,
            kernels: HashMap::new(),
            blas,
            name,
            processors,
            programmatic: major >= 9,
        };
        let arch = format!("sm_{major}{minor}");
        let sources = sources(layouts);
        let compile = |source: &Source| {
            let text = [&source.defines, HEADERS[0], HEADERS[1], source.text].join("\n");
            crate::nvrtc::cubin(&source.name, &text, &arch, cache)
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
                gpu.kernels.insert(name.clone(), function);
            }
        }
        Ok(gpu)
    }

    /// A compiled kernel.
    pub fn kernel(&self, name: &str) -> Result<CudaFunction, DeviceError> {
        self.kernels
            .get(name)
            .cloned()
            .ok_or_else(|| DeviceError::Backend(format!("CUDA: kernel {name} is not compiled")))
    }

    /// Whether products on many rows may use cuBLAS.
    pub fn has_blas(&self) -> bool {
        self.blas.is_some()
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
        Ok(Memory { slice, ptr })
    }

    /// Copies bytes to the card at an offset.
    pub fn upload(&self, to: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut view = to.slice.slice_mut(at..at + bytes.len());
        self.stream.memcpy_htod(bytes, &mut view).map_err(failed("copy to the card"))
    }

    /// Copies bytes from the card and waits for them.
    pub fn download(&self, from: &Memory, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let view = from.slice.slice(at..at + out.len());
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
        let mut view = to.slice.slice_mut(at..at + bytes);
        self.stream
            .memcpy_dtod(&from.slice.slice(from_at..from_at + bytes), &mut view)
            .map_err(failed("copy on the card"))
    }

    /// Waits for everything submitted.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.stream.synchronize().map_err(failed("wait for the card"))
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
            hStream: self.stream.cu_stream(),
            attrs: &mut attribute,
            numAttrs: u32::from(self.programmatic),
        };
        // SAFETY: the parameters live until the call returns and match the kernel's signature, which program.rs builds
        // beside the kernel's name; every address in them belongs to this device.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, kernel.cu_function(), params.as_mut_ptr(), std::ptr::null_mut())
        };
        code.result().map_err(failed("launch a kernel"))
    }

    /// out (n x m, f32, rows `stride` apart) = x (n x k, f16) times w (m x k, f16) transposed, on tensor cores.
    pub fn gemm(
        &self,
        w: u64,
        x: u64,
        out: u64,
        shape: (usize, usize, usize),
        stride: usize,
    ) -> Result<(), DeviceError> {
        let Some(blas) = &self.blas else {
            return Err(DeviceError::Backend("cuBLAS was not found".into()));
        };
        let ((m, n, k), one, zero) = (shape, 1.0f32, 0.0f32);
        use blas_sys::cublasOperation_t::*;
        // SAFETY: the three matrices have the stated shapes; program.rs sizes them.
        unsafe {
            blas::gemm_ex(
                *blas.handle(),
                CUBLAS_OP_T,
                CUBLAS_OP_N,
                m as i32,
                n as i32,
                k as i32,
                (&raw const one).cast(),
                w as *const _,
                blas_sys::cudaDataType_t::CUDA_R_16F,
                k as i32,
                x as *const _,
                blas_sys::cudaDataType_t::CUDA_R_16F,
                k as i32,
                (&raw const zero).cast(),
                out as *mut _,
                blas_sys::cudaDataType_t::CUDA_R_32F,
                stride as i32,
                blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                blas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        }
        .map_err(|e| DeviceError::Backend(format!("cuBLAS: {e:?}")))
    }
}
