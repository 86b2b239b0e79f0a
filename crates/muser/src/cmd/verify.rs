//! `muser verify`: whether a device computes what a receipt, or another device, says.

use crate::cmd::receipt::PromptArgs;
use crate::device::{DeviceArgs, DeviceName, LaneName};
use crate::open::{Draft, Opened, SourceArgs};
use crate::receipt::{ModelDigests, ReceiptFile};
use anyhow::{Result, bail, ensure};
use clap::Args;
use muser_core::compare::{Difference, first_difference};
use muser_core::receipt::{Mismatch, Receipt, receipt};
use muser_core::{Device, Lane};
use serde_json::{Value as Json, json};
use std::io::Write;
use std::path::PathBuf;

/// Check that a device computes what a receipt says, or what another device does
///
/// Ends with code 1 at the first difference, and names the layer, step and element with both values. A receipt tells the
/// layer alone; for a model of up to 2 GB the reference then finds the element.
#[derive(Args)]
pub struct Verify {
    #[command(flatten)]
    source: SourceArgs,
    /// A receipt: what it says is computed again on --device
    #[arg(long, value_name = "FILE", required_unless_present = "devices", conflicts_with_all = ["devices", "tokens", "tolerance"])]
    against: Option<PathBuf>,
    /// Two devices to compare, such as cpu,reference or cpu,cuda
    #[arg(long, value_name = "A,B", value_parser = pair, conflicts_with = "device")]
    devices: Option<Pair>,
    #[command(flatten)]
    prompts: PromptArgs,
    /// Distance at which two values differ; 0 compares bits
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = tolerance)]
    tolerance: f32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

type Pair = [DeviceName; 2];

fn pair(text: &str) -> Result<Pair, String> {
    match text.split_once(',') {
        Some((a, b)) => Ok([a.trim().parse()?, b.trim().parse()?]),
        None => Err("names one device: give two, such as cpu,reference".into()),
    }
}

fn tolerance(text: &str) -> Result<f32, String> {
    let value = text.parse::<f32>().ok().filter(|v| v.is_finite() && *v >= 0.0);
    value.ok_or_else(|| "is no distance: give a number from 0 on".into())
}

/// What was found at one prompt.
enum Found {
    Same,
    Receipt(Mismatch, Option<Difference>),
    Devices(Difference),
}

impl Verify {
    /// Runs the command; fails if something differs.
    pub fn run(mut self) -> Result<()> {
        // A receipt tells of the target alone.
        if self.against.is_some() {
            self.source.draft = Some(Draft::Off);
        }
        let opened = self.source.open()?;
        let report = match (&self.against, self.devices) {
            (Some(path), _) => {
                let file = ReceiptFile::read(path)?;
                self.take_arithmetic(&file)?;
                self.check(&opened, &file)?
            }
            (None, Some(devices)) => {
                self.device.lane.get_or_insert(LaneName::Strict);
                self.compare(&opened, devices)?
            }
            // clap demands one of them.
            (None, None) => bail!("give --against FILE or --devices A,B"),
        };
        report.print(self.json)
    }

    /// The receipt says in which arithmetic; a flag that says another is a mistake.
    fn take_arithmetic(&mut self, file: &ReceiptFile) -> Result<()> {
        let (lane, kv) = file.arithmetic()?;
        if let Some(asked) = self.device.lane.filter(|asked| *asked != lane) {
            bail!(
                "the receipt is of the {} lane, not of the {} lane: leave --lane out",
                lane.name(),
                asked.name()
            );
        }
        self.device.lane = Some(lane);
        self.device.kv = kv;
        Ok(())
    }

    fn check(&self, opened: &Opened, file: &ReceiptFile) -> Result<Report> {
        let here = ModelDigests::new(opened)?;
        if here.sha256 != file.model.sha256 {
            let same = |same| if same { "the same" } else { "another" };
            bail!(
                "the receipt is of another model: {} with SHA-256 {}, but {} has {} ({} tokenizer, {} template)",
                file.model.file,
                file.model.sha256,
                here.file,
                here.sha256,
                same(here.tokenizer == file.model.tokenizer),
                same(here.template == file.model.template)
            );
        }
        let wanted = file.runs(opened.model.geometry())?;
        let mut device =
            self.device.load(opened, (1, wanted.iter().map(|r| r.tokens.len()).max().unwrap_or(1)))?;
        let info = device.info();
        ensure!(
            info.lane == Lane::Strict || info.kind == file.device,
            "the receipt is of the serving lane of {}, which {} does not share: give --device {0}, or a receipt of the strict lane",
            file.device,
            info.kind
        );
        let names = [info.name.clone(), format!("the receipt of muser {}", file.muser)];
        let mut report = Report { names, lane: self.device.lane(), prompts: vec![] };
        for want in &wanted {
            let got = receipt(&opened.model, device.as_mut(), &want.tokens, self.device.chunk(), want.span)?;
            let found = match got.mismatch(want) {
                None => Found::Same,
                Some(mismatch) => Found::Receipt(mismatch, self.locate(opened, device.as_mut(), want)?),
            };
            report.prompts.push((want.tokens.len(), found));
        }
        Ok(report)
    }

    /// Where the device leaves the reference, if the receipt is the reference's.
    fn locate(&self, opened: &Opened, device: &mut dyn Device, want: &Receipt) -> Result<Option<Difference>> {
        if self.device.lane() != LaneName::Strict || opened.model.weight_bytes() > 2_000_000_000 {
            return Ok(None);
        }
        let mut reference = self.device.load_on(DeviceName::Reference, opened, (1, want.tokens.len()))?;
        let theirs =
            receipt(&opened.model, reference.as_mut(), &want.tokens, self.device.chunk(), want.span)?;
        if theirs.mismatch(want).is_some() {
            return Ok(None);
        }
        Ok(first_difference(
            &opened.model,
            [device, reference.as_mut()],
            &want.tokens,
            self.device.chunk(),
            0.0,
        )?)
    }

    fn compare(&self, opened: &Opened, devices: Pair) -> Result<Report> {
        let cards = devices.iter().any(|device| matches!(device, DeviceName::Cuda(_)));
        ensure!(
            self.device.gpu_layers.is_none_or(|layers| cards && layers > 0),
            "--gpu-layers is for cuda among the two devices, and for at least one layer; leave it out"
        );
        let prompts = self.prompts.ids(opened.model.geometry())?;
        let wanted = (1, prompts.iter().map(Vec::len).max().unwrap_or(1));
        let mut a = self.device.load_on(devices[0], opened, wanted)?;
        let mut b = self.device.load_on(devices[1], opened, wanted)?;
        let names = [a.info().name, b.info().name];
        let mut report = Report { names, lane: self.device.lane(), prompts: vec![] };
        for tokens in &prompts {
            let difference = first_difference(
                &opened.model,
                [a.as_mut(), b.as_mut()],
                tokens,
                self.device.chunk(),
                self.tolerance,
            )?;
            report.prompts.push((tokens.len(), difference.map_or(Found::Same, Found::Devices)));
        }
        Ok(report)
    }
}

struct Report {
    names: [String; 2],
    lane: LaneName,
    /// Length of each prompt, and what was found.
    prompts: Vec<(usize, Found)>,
}

impl Found {
    fn text(&self) -> String {
        match self {
            Found::Same => "the same".into(),
            Found::Devices(difference) | Found::Receipt(_, Some(difference)) => difference.to_string(),
            Found::Receipt(mismatch, None) => mismatch.to_string(),
        }
    }

    fn json(&self) -> Json {
        let (mismatch, difference) = match self {
            Found::Same => (None, None),
            Found::Receipt(mismatch, difference) => (Some(mismatch), difference.as_ref()),
            Found::Devices(difference) => (None, Some(difference)),
        };
        json!({
            "same": matches!(self, Found::Same),
            "mismatch": mismatch.map(ToString::to_string),
            "difference": difference.map(|d| json!({
                "pass": format!("{:?}", d.pass).to_lowercase(),
                "layer": d.layer,
                "step": d.step,
                "name": d.name,
                "buffer": format!("{:?}", d.buf),
                "position": d.position,
                "element": d.element,
                "values": [d.values.0, d.values.1],
            })),
        })
    }
}

impl Report {
    fn print(&self, as_json: bool) -> Result<()> {
        let [a, b] = &self.names;
        let mut out = std::io::stdout().lock();
        if as_json {
            let prompt = |(tokens, found): &(usize, Found)| {
                let mut json = found.json();
                json["tokens"] = (*tokens).into();
                json
            };
            let prompts: Vec<Json> = self.prompts.iter().map(prompt).collect();
            let report = json!({ "devices": [a, b], "lane": self.lane.name(), "prompts": prompts });
            writeln!(out, "{report}")?;
        } else {
            writeln!(out, "{a}, {} lane, beside {b}", self.lane.name())?;
            for (tokens, found) in &self.prompts {
                writeln!(out, "{tokens} tokens: {}", found.text())?;
            }
        }
        out.flush()?;
        let different = self.prompts.iter().filter(|(_, found)| !matches!(found, Found::Same)).count();
        ensure!(different == 0, "{different} of {} prompts differ", self.prompts.len());
        Ok(())
    }
}
