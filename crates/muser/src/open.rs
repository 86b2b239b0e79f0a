//! From flags to an opened model: which file, which drafter, which shape.

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use muser_core::model::{self, QuantMix, Synthetic};
use muser_core::{DraftMode, Model, Net};
use muser_format::Gguf;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// The model that comes with muser.
const DEFAULT_MODEL: &str = "glimmer-mini-Q8_0.gguf";

/// Names a target model.
#[derive(Args, Clone, Debug, Default)]
pub struct ModelArgs {
    /// Model, a GGUF file [default: $MUSER_MODEL, else the glimmer-mini that comes with muser]
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
}

impl ModelArgs {
    /// The file that is meant.
    pub fn path(&self) -> Result<PathBuf> {
        if let Some(path) = &self.model {
            return Ok(path.clone());
        }
        if let Some(path) = std::env::var_os("MUSER_MODEL").filter(|p| !p.is_empty()) {
            return Ok(path.into());
        }
        let places = default_places();
        places.iter().find(|p| p.is_file()).cloned().with_context(|| {
            let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
            format!(
                "no model was named and {DEFAULT_MODEL} is in none of {}; give a GGUF file with -m FILE or in MUSER_MODEL",
                places.join(", ")
            )
        })
    }

    /// Opens the file alone, for commands that compute nothing.
    pub fn gguf(&self) -> Result<Gguf> {
        Ok(Gguf::open(&self.path()?)?)
    }
}

/// Where the default model is looked for: beside the program, in the current folder, in the sources it was built from.
pub fn default_places() -> Vec<PathBuf> {
    let mut folders = vec![];
    if let Some(folder) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
        folders.push(folder.join("models"));
        folders.push(folder.to_path_buf());
        folders.push(folder.join("../share/muser"));
    }
    folders.push("models".into());
    folders.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models"));
    folders.into_iter().map(|f| f.join(DEFAULT_MODEL)).collect()
}

/// What proposes tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Draft {
    /// The drafter that stands beside the model, if there is one, and lookups.
    #[default]
    Auto,
    /// Lookups alone.
    Lookup,
    /// Nothing.
    Off,
    /// The drafter of this file, and lookups.
    File(PathBuf),
}

impl FromStr for Draft {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Draft::Auto,
            "lookup" => Draft::Lookup,
            "off" => Draft::Off,
            file => Draft::File(file.into()),
        })
    }
}

/// Names a target and its drafter.
#[derive(Args, Clone, Debug)]
pub struct SourceArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Drafter: a GGUF file, an assistant's folder, `auto` (the one beside the model), `lookup` (none: drafts come from the sequence's
    /// own tokens only) or `off` (no drafts) [default: auto; off for random weights]
    #[arg(long, value_name = "FILE")]
    pub draft: Option<Draft>,
}

/// Shapes that can be filled with random weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GeometryName {
    /// The released 30B model and its drafter.
    #[value(name = "muse-glimmer-30b")]
    MuseGlimmer30b,
}

/// Random weights instead of a file.
#[derive(Args, Clone, Debug)]
pub struct SyntheticArgs {
    /// Random weights of this shape instead of a model file
    #[arg(long, value_name = "NAME", value_enum, conflicts_with = "model")]
    pub geometry: Option<GeometryName>,
    /// Type of the random weights: q4_k_m, or one type such as q8_0
    #[arg(long, value_name = "TYPE", default_value = "q4_k_m", value_parser = parse_mix, requires = "geometry")]
    pub quant: QuantMix,
    /// Layers of the random model [default: as released]
    #[arg(long, value_name = "N", requires = "geometry", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub layers: Option<u16>,
}

fn parse_mix(name: &str) -> Result<QuantMix, String> {
    QuantMix::from_name(name)
        .ok_or_else(|| "is neither q4_k_m nor a ggml type such as q8_0, q6_k, bf16".to_string())
}

/// A model with what is known of its origin.
pub struct Opened {
    /// The model's file, or the name of its geometry.
    pub name: String,
    /// The file; none for random weights.
    pub path: Option<PathBuf>,
    /// The drafter's file.
    pub drafter: Option<PathBuf>,
    /// Shapes and weights.
    pub model: Arc<Model>,
    /// The target's file with tokenizer and template; none for random weights.
    pub gguf: Option<Arc<Gguf>>,
}

impl SourceArgs {
    /// Opens the model and its drafter. A drafter beside the model that does not fit is no candidate; one that was named
    /// must fit.
    pub fn open(&self) -> Result<Opened> {
        let path = self.model.path()?;
        let drafter = match &self.draft {
            None | Some(Draft::Auto) => model::find_drafter(&path),
            Some(Draft::Off | Draft::Lookup) => None,
            Some(Draft::File(file)) => Some(file.clone()),
        };
        let (model, gguf) = model::open(&path, drafter.as_deref())?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Opened { name, path: Some(path), drafter, model: Arc::new(model), gguf: Some(gguf) })
    }

    /// How sessions draft: as it pays, or always `rows`.
    pub fn draft_mode(&self, rows: Option<usize>) -> DraftMode {
        match (&self.draft, rows) {
            (Some(Draft::Off), _) | (_, Some(0)) => DraftMode::Off,
            (_, Some(rows)) => DraftMode::Fixed(rows),
            (_, None) => DraftMode::Auto,
        }
    }

    /// Opens a file or, with `--geometry`, makes random weights; without `weights` only their shapes, to plan with.
    pub fn open_or_make(&self, synthetic: &SyntheticArgs, weights: bool) -> Result<Opened> {
        let Some(GeometryName::MuseGlimmer30b) = synthetic.geometry else { return self.open() };
        let layers = synthetic.layers.map_or(52, usize::from);
        let geometry = model::muse_glimmer_30b(layers);
        let make = |net, geometry, features| -> Box<dyn model::Weights> {
            Box::new(match weights {
                true => Synthetic::new(net, geometry, features, synthetic.quant, 1),
                false => Synthetic::shapes(net, geometry, features, synthetic.quant),
            })
        };
        // Random weights confirm no draft: a drafter only shows its cost, so it must be asked for.
        let draft = match &self.draft {
            None | Some(Draft::Off | Draft::Lookup) => None,
            Some(Draft::Auto) => {
                let (geometry, spec) = model::muse_glimmer_30b_drafter(layers);
                let weights = make(Net::Draft, geometry.clone(), spec.target_layers.len());
                Some((geometry, spec, weights))
            }
            Some(Draft::File(file)) => {
                bail!("{} can't draft for random weights; give --draft auto or off", file.display())
            }
        };
        let target = make(Net::Target, geometry.clone(), 0);
        let model = Arc::new(Model::new(geometry, target, draft)?);
        let name = format!("muse-glimmer-30b, {layers} layers, {}", mix_name(synthetic.quant));
        Ok(Opened { name, path: None, drafter: None, model, gguf: None })
    }
}

/// The name that [`QuantMix::from_name`] takes.
pub fn mix_name(mix: QuantMix) -> String {
    match mix {
        QuantMix::Q4KM => "q4_k_m".into(),
        QuantMix::Uniform(dtype) => dtype.name().to_ascii_lowercase(),
    }
}
