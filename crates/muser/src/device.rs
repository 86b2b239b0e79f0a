//! Which device runs the model, and how.

use crate::open::Opened;
use crate::output::Progress;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use muser_core::cost::Cost;
use muser_core::split::join_routes;
use muser_core::{Device, KvType, Lane, Limits, Model, Pass, Reference, Route, Split};
use muser_cpu::{CpuDevice, CpuOptions, Isa, probe};
use muser_cuda::{CudaDevice, CudaOptions, Describer};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

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
    /// Layers that the GPU runs, the last ones, with the head and the drafter; the CPU runs those before [default: all]
    #[arg(
        long,
        value_name = "N",
        visible_alias = "ngl",
        alias = "n-gpu-layers",
        allow_negative_numbers = true,
        value_parser = parse_layers
    )]
    pub gpu_layers: Option<usize>,
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

fn parse_layers(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| {
        "is no number of layers: give 0 (none) or more; any number beyond the model's is all".into()
    })
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

    /// Loads the model on the device that was asked for. `wanted` is how many sequences there will be, and positions of each; a card that
    /// was not named must have room for one.
    pub fn load(&self, opened: &Opened, wanted: (usize, usize)) -> Result<Box<dyn Device>> {
        let chosen = self.chosen()?;
        let mut device = self.load_on(chosen, opened, wanted)?;
        if chosen == DeviceName::Auto && device.info().kind != "cpu" {
            match device.open(wanted.1) {
                Ok(seq) => device.close(seq),
                Err(error) => {
                    drop(device);
                    return self.load_instead(&error.into(), &opened.model);
                }
            }
        }
        Ok(device)
    }

    /// Loads the model on the CPU because no card will do.
    fn load_instead(&self, error: &anyhow::Error, model: &Arc<Model>) -> Result<Box<dyn Device>> {
        eprintln!("running on the CPU instead of the card: {error:#}");
        self.load_cpu(model)
    }

    /// The device that was asked for: layers for a GPU are for no other, and without them the processor does all.
    pub fn chosen(&self) -> Result<DeviceName> {
        match (self.device, self.gpu_layers) {
            (name, None) => Ok(name),
            (name @ (DeviceName::Cpu | DeviceName::Reference), Some(0)) => Ok(name),
            (_, Some(0)) => Ok(DeviceName::Cpu),
            (DeviceName::Auto, Some(_)) => Ok(DeviceName::Cuda(0)),
            (name @ DeviceName::Cuda(_), Some(_)) => Ok(name),
            (name, Some(n)) => bail!("--gpu-layers {n}: --device {name} is no GPU; leave one of them out"),
        }
    }

    /// How many of a model's layers are not for the GPU; none where it has all.
    fn cpu_layers(&self, model: &Model) -> Option<usize> {
        let layers = model.geometry().layers.len();
        self.gpu_layers.filter(|n| (1..layers).contains(n)).map(|n| layers - n)
    }

    /// Loads the model on this device.
    pub fn load_on(
        &self,
        device: DeviceName,
        opened: &Opened,
        wanted: (usize, usize),
    ) -> Result<Box<dyn Device>> {
        let model = &opened.model;
        match device {
            DeviceName::Cuda(index) => {
                let Some([first, last]) = self.cpu_layers(model).and_then(|n| model.split(n)) else {
                    return self.load_cuda(index, model, self.chunk.map(usize::from), wanted);
                };
                let (first, last) = (Arc::new(first), Arc::new(last));
                // What the card has no room for is soon known.
                let card = self.load_cuda(index, &last, Some(self.chunk()), wanted)?;
                Ok(Box::new(Split::new([&first, &last], [self.load_cpu(&first)?, card])?))
            }
            DeviceName::Auto if self.suits_cuda() && muser_cuda::is_available() => self
                .load_cuda(0, model, self.chunk.map(usize::from), wanted)
                .or_else(|error| self.load_instead(&error, model)),
            DeviceName::Reference => {
                Ok(Box::new(Reference::new(model.clone(), self.kv.into(), self.chunk())))
            }
            DeviceName::Auto | DeviceName::Cpu => self.load_cpu(model),
        }
    }

    fn load_cpu(&self, model: &Arc<Model>) -> Result<Box<dyn Device>> {
        let options = CpuOptions {
            lane: self.lane().into(),
            threads: self.threads.map(usize::from),
            isa: self.isa,
            max_rows: self.chunk(),
            kv: self.kv.into(),
            mapped: self.mapped,
        };
        let mut bar = Progress::new("loading", true);
        let device = CpuDevice::load(model.clone(), &options, &mut |done, total| bar.at(done, total));
        Ok(Box::new(device?))
    }

    /// Whether the CUDA device does what was asked for.
    fn suits_cuda(&self) -> bool {
        self.lane() == LaneName::Serving && self.kv != KvName::F32
    }

    fn load_cuda(
        &self,
        index: usize,
        model: &Arc<Model>,
        max_rows: Option<usize>,
        wanted: (usize, usize),
    ) -> Result<Box<dyn Device>> {
        let options = CudaOptions {
            lane: self.lane().into(),
            index,
            max_rows,
            kv: self.kv.into(),
            batch_invariant: self.batch_invariant,
            wanted,
            ..CudaOptions::default()
        };
        let mut bar = Progress::new("loading", true);
        let device = CudaDevice::load(model.clone(), &options, &mut |done, total| bar.at(done, total));
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
        let model = &opened.model;
        let isa = self.isa.unwrap_or_else(Isa::best);
        let on_cpu = |model: &Model| muser_cpu::routes(model, pass, rows, self.lane().into(), isa);
        match self.chosen()? {
            DeviceName::Cuda(index) => {
                let split = self.cpu_layers(model).and_then(|n| model.split(n));
                let part = split.as_ref().map_or(&**model, |[_, last]| last);
                let most = self.chunk().max(rows);
                let (lane, even) = (self.lane().into(), self.batch_invariant);
                let passes = Describer::new(part, lane, even, Some(index), most, self.kv.into())?;
                let routes = passes.routes(pass, rows, depth)?;
                Ok(match &split {
                    Some([first, _]) if pass == Pass::Target => {
                        let border = first.plans.target.steps.len();
                        let name = format!("cpu {isa}, then {}", passes.card());
                        (name, join_routes(border, on_cpu(first), routes))
                    }
                    _ => (passes.card().to_string(), routes),
                })
            }
            DeviceName::Reference => {
                let device = Reference::new(model.clone(), KvType::F16, self.chunk());
                Ok((device.info().name, device.routes(pass, rows, depth)))
            }
            DeviceName::Auto | DeviceName::Cpu => Ok((format!("cpu {isa}"), on_cpu(model))),
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

/// What the hardware under a pass can do: from which step on.
pub struct PassLimits(Vec<(usize, Limits)>);

impl PassLimits {
    /// Measured now.
    pub fn measure(device: &mut dyn Device, pass: Pass, threads: Option<u16>) -> Result<Self> {
        let all = device.limits(pass)?.into_iter();
        Ok(PassLimits(all.map(|(at, l)| (at, l.unwrap_or_else(|| measure_processor(threads)))).collect()))
    }

    /// The better of two measurements.
    pub fn best(self, other: PassLimits) -> Self {
        PassLimits(self.0.into_iter().zip(other.0).map(|((at, a), (_, b))| (at, a.best(b))).collect())
    }

    /// Under a step.
    pub fn at(&self, step: usize) -> Limits {
        let after = self.0.iter().take_while(|(first, _)| *first <= step).last();
        after.or(self.0.first()).map_or(Limits { bytes_per_second: 1.0, operations_per_second: 1.0 }, |l| l.1)
    }

    /// Of one device that would take as long as all of them for steps of these costs, each with its place.
    pub fn joined(&self, costs: &[(usize, Cost)]) -> Limits {
        let rate = |of: fn(&Cost) -> u64, rate: fn(Limits) -> f64| {
            let all: f64 = costs.iter().map(|(_, cost)| of(cost) as f64).sum();
            let seconds: f64 = costs.iter().map(|(at, cost)| of(cost) as f64 / rate(self.at(*at))).sum();
            if seconds > 0.0 { all / seconds } else { rate(self.at(0)) }
        };
        Limits {
            bytes_per_second: rate(Cost::memory_bytes, |l| l.bytes_per_second),
            operations_per_second: rate(|cost| cost.operations, |l| l.operations_per_second),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    #[test]
    fn limits_are_those_of_the_device_under_each_step() {
        let limits = |rate| Limits { bytes_per_second: rate, operations_per_second: 10.0 * rate };
        let under = PassLimits(vec![(0, limits(1.0)), (4, limits(100.0))]);
        assert_eq!([0, 3, 4, 90].map(|step| under.at(step).bytes_per_second), [1.0, 1.0, 100.0, 100.0]);
        let cost = |weight_bytes| Cost { weight_bytes, operations: 20 * weight_bytes, ..Cost::default() };
        let joined = under.joined(&[(3, cost(100)), (4, cost(1100))]);
        assert_eq!(joined.bytes_per_second, 1200.0 / (100.0 + 11.0));
        assert_eq!(joined.operations_per_second, 24_000.0 / (200.0 + 22.0));
        let one = PassLimits(vec![(0, limits(7.0))]).best(PassLimits(vec![(0, limits(8.0))]));
        assert_eq!(one.joined(&[(0, cost(5)), (9, cost(11))]), limits(8.0));
    }

    #[test]
    fn layers_for_a_gpu_choose_one() {
        let chosen = |device: &str, layers: Option<&str>| {
            let mut args = vec!["muser", "--device", device];
            args.extend(layers.iter().flat_map(|n| ["--ngl", n]));
            let matches = DeviceArgs::augment_args(clap::Command::new("muser")).try_get_matches_from(args);
            let args = matches.and_then(|m| DeviceArgs::from_arg_matches(&m)).map_err(|e| e.to_string())?;
            args.chosen().map_err(|e| e.to_string())
        };
        assert_eq!(chosen("auto", None), Ok(DeviceName::Auto));
        assert_eq!(chosen("auto", Some("40")), Ok(DeviceName::Cuda(0)));
        assert_eq!(chosen("cuda:1", Some("999")), Ok(DeviceName::Cuda(1)));
        assert_eq!(
            [chosen("cuda", Some("0")), chosen("cpu", Some("0"))],
            [Ok(DeviceName::Cpu), Ok(DeviceName::Cpu)]
        );
        for device in ["cpu", "reference"] {
            assert!(chosen(device, Some("1")).unwrap_err().contains("is no GPU"));
        }
        for layers in ["-1", "", "1.5", "all", "99999999999999999999999"] {
            assert!(chosen("cuda", Some(layers)).unwrap_err().contains("is no number of layers"), "{layers}");
        }
    }
}
