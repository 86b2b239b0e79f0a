//! Which device runs the model, and how.

use crate::open::Opened;
use crate::output::Progress;
use anyhow::Result;
use clap::{Args, ValueEnum};
use muser_core::{Device, KvType, Lane, Limits, Pass, Reference, Route};
use muser_cpu::{CpuDevice, CpuOptions, Isa, probe};
use muser_cuda::{CudaDevice, CudaOptions, Describer};
use std::fmt;
use std::str::FromStr;

/// Devices by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// A GPU if one is usable and the model fits, else the processor.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// This NVIDIA GPU.
    Cuda(usize),
    /// The naive f32 reference: slow, for checks.
    Reference,
}

impl FromStr for DeviceName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(DeviceName::Auto),
            "cpu" => Ok(DeviceName::Cpu),
            "reference" => Ok(DeviceName::Reference),
            "cuda" => Ok(DeviceName::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(DeviceName::Cuda)
                .ok_or_else(|| "is none of auto, cpu, cuda, cuda:N, reference".to_string()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Auto => f.write_str("auto"),
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(n) => write!(f, "cuda:{n}"),
            DeviceName::Reference => f.write_str("reference"),
        }
    }
}

/// Arithmetic by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LaneName {
    /// The fastest that keeps quality
    #[default]
    Serving,
    /// The same bits on every device, thread count and batch
    Strict,
}

impl LaneName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            LaneName::Serving => "serving",
            LaneName::Strict => "strict",
        }
    }
}

impl From<LaneName> for Lane {
    fn from(name: LaneName) -> Lane {
        match name {
            LaneName::Serving => Lane::Serving,
            LaneName::Strict => Lane::Strict,
        }
    }
}

/// Types of cached keys and values by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvName {
    /// Half precision
    #[default]
    F16,
    /// 8-bit blocks: half the memory
    #[value(name = "q8_0")]
    Q8_0,
    /// Single precision: the reference device only
    F32,
}

impl KvName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            KvName::F16 => "f16",
            KvName::Q8_0 => "q8_0",
            KvName::F32 => "f32",
        }
    }
}

impl From<KvName> for KvType {
    fn from(name: KvName) -> KvType {
        match name {
            KvName::F16 => KvType::F16,
            KvName::Q8_0 => KvType::Q8_0,
            KvName::F32 => KvType::F32,
        }
    }
}

/// How the model is run.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// auto, cpu, cuda, cuda:N or reference (naive and slow, for checks)
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub device: DeviceName,
    /// Arithmetic [default: serving; strict for receipt and verify]
    #[arg(long, value_enum)]
    pub lane: Option<LaneName>,
    /// Threads of the CPU device [default: one a core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Instructions of the CPU device: avx512, avx2, neon or scalar [default: the best there are]
    #[arg(long, value_name = "NAME", value_parser = parse_isa)]
    pub isa: Option<Isa>,
    /// CPU: leave weights in the file and unpack them at every use; starts at once, decodes slowly
    #[arg(long)]
    pub mapped: bool,
    /// Rows that one pass computes at most: prefill goes in chunks of this many [default: 512; 2048 on a card with memory to spare]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8192))]
    pub chunk: Option<u16>,
    /// Type of cached keys and values
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: KvName,
    /// CUDA: a row's bits do not depend on the rows beside it; few rows a pass take longer. The CPU is always so
    #[arg(long)]
    pub batch_invariant: bool,
}

fn parse_isa(name: &str) -> Result<Isa, String> {
    Isa::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = Isa::ALL.iter().map(|isa| isa.name()).collect();
        format!("is none of {}", names.join(", "))
    })
}

impl DeviceArgs {
    /// The arithmetic that was asked for.
    pub fn lane(&self) -> LaneName {
        self.lane.unwrap_or_default()
    }

    /// Rows of a chunk that every device takes.
    pub fn chunk(&self) -> usize {
        self.chunk.map_or(512, usize::from)
    }

    /// Loads the model on the device that was asked for; a card that was not named must have room for a context of this many tokens.
    pub fn load_for(&self, context: usize, opened: &Opened) -> Result<Box<dyn Device>> {
        let mut device = self.load(opened)?;
        if self.device == DeviceName::Auto && device.info().kind != "cpu" {
            match device.open(context) {
                Ok(seq) => device.close(seq),
                Err(error) => {
                    drop(device);
                    return self.load_instead(&error.into(), opened);
                }
            }
        }
        Ok(device)
    }

    /// Loads the model on the CPU because no card will do.
    fn load_instead(&self, error: &anyhow::Error, opened: &Opened) -> Result<Box<dyn Device>> {
        eprintln!("running on the CPU instead of the card: {error:#}");
        self.load_on(DeviceName::Cpu, opened)
    }

    /// Loads the model on the device that was asked for.
    pub fn load(&self, opened: &Opened) -> Result<Box<dyn Device>> {
        self.load_on(self.device, opened)
    }

    /// Loads the model on this device.
    pub fn load_on(&self, device: DeviceName, opened: &Opened) -> Result<Box<dyn Device>> {
        let max_rows = self.chunk();
        match device {
            DeviceName::Cuda(index) => self.load_cuda(index, opened),
            DeviceName::Auto if self.suits_cuda() && muser_cuda::is_available() => {
                self.load_cuda(0, opened).or_else(|error| self.load_instead(&error, opened))
            }
            DeviceName::Reference => {
                Ok(Box::new(Reference::new(opened.model.clone(), self.kv.into(), max_rows)))
            }
            DeviceName::Auto | DeviceName::Cpu => {
                let options = CpuOptions {
                    lane: self.lane().into(),
                    threads: self.threads.map(usize::from),
                    isa: self.isa,
                    max_rows,
                    kv: self.kv.into(),
                    mapped: self.mapped,
                };
                let mut bar = Progress::new("loading", true);
                let device =
                    CpuDevice::load(opened.model.clone(), &options, &mut |done, total| bar.at(done, total));
                Ok(Box::new(device?))
            }
        }
    }

    /// Whether the CUDA device does what was asked for.
    fn suits_cuda(&self) -> bool {
        self.lane() == LaneName::Serving && self.kv != KvName::F32
    }

    fn load_cuda(&self, index: usize, opened: &Opened) -> Result<Box<dyn Device>> {
        let options = CudaOptions {
            lane: self.lane().into(),
            index,
            max_rows: self.chunk.map(usize::from),
            kv: self.kv.into(),
            batch_invariant: self.batch_invariant,
            ..CudaOptions::default()
        };
        let mut bar = Progress::new("loading", true);
        let device = CudaDevice::load(opened.model.clone(), &options, &mut |done, total| bar.at(done, total));
        Ok(Box::new(device?))
    }

    /// The kernels of a pass in order, with the device's name; nothing is loaded.
    pub fn routes(
        &self,
        opened: &Opened,
        pass: Pass,
        rows: usize,
        depth: usize,
    ) -> Result<(String, Vec<Route>)> {
        match self.device {
            DeviceName::Cuda(index) => {
                let most = self.chunk().max(rows);
                let (lane, even) = (self.lane().into(), self.batch_invariant);
                let passes = Describer::new(&opened.model, lane, even, Some(index), most, self.kv.into())?;
                Ok((passes.card().to_string(), passes.routes(pass, rows, depth)?))
            }
            DeviceName::Reference => {
                let device = Reference::new(opened.model.clone(), KvType::F16, self.chunk());
                Ok((device.info().name, device.routes(pass, rows, depth)))
            }
            DeviceName::Auto | DeviceName::Cpu => {
                let isa = self.isa.unwrap_or_else(Isa::best);
                let lane = self.lane().into();
                Ok((format!("cpu {isa}"), muser_cpu::routes(&opened.model, pass, rows, lane, isa)))
            }
        }
    }
}

/// What this machine's processor can do with `threads` threads; takes about a second.
pub fn measure_processor(threads: Option<u16>) -> Limits {
    let threads = threads.map_or_else(|| muser_cpu::features().threads, usize::from);
    Limits {
        bytes_per_second: probe::read_bandwidth(threads, 1 << 30),
        operations_per_second: probe::int8_peak(threads),
    }
}

/// What the hardware under a device can do, measured now.
pub fn measure_limits(device: &mut dyn Device, threads: Option<u16>) -> Result<Limits> {
    Ok(device.limits()?.unwrap_or_else(|| measure_processor(threads)))
}
