//! `muser serve`: the HTTP server.

use crate::device::DeviceArgs;
use crate::open::SourceArgs;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use muser_core::Engine;
use muser_server::app::{App, ServerOptions};
use muser_server::generate::Generator;
use muser_server::intake::Intake;
use muser_server::metrics::Metrics;
use muser_server::saved::SavedSessions;
use muser_server::serve::Tls;
use muser_server::slots::{SlotOptions, Slots};
use muser_server::text::TextModel;
use muser_server::{ModelDetails, serve};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Serve OpenAI's, Anthropic's, Ollama's and llama.cpp's HTTP interfaces, and a web page for chatting
///
/// Listens on this machine alone; to be reached from others it needs --host and an API key.
#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    source: SourceArgs,
    /// Address to listen on
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// The model's name for clients [default: the file's name without its ending]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// Requests that run at the same time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    slots: u16,
    /// Tokens of prompt and answer that each request may have [default: the model's context]
    #[arg(short, long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    context: usize,
    /// Requests that may wait for a slot; more are refused with 503
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: usize,
    /// MiB of memory for conversations that have left their slots
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    cache: usize,
    /// Folder in which clients may save slots' sessions, by POST /slots/ID?action=save
    #[arg(long, value_name = "DIR")]
    slot_save_path: Option<PathBuf>,
    /// A key that clients must send; may be given several times. Also read from $MUSER_API_KEY
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// A file with one key a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// PEM file with the certificate for HTTPS; needs a muser built with `--features tls`
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// An origin whose web pages may use the server, or `*`; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<String>,
    /// Refuse requests with unknown fields or another model's name
    #[arg(long)]
    strict_requests: bool,
    /// Under tool_choice auto, let the model write calls freely instead of by the tools' grammar
    #[arg(long)]
    free_calls: bool,
    /// MiB that a request's body may have
    #[arg(long, value_name = "MIB", default_value_t = 4)]
    body_limit: usize,
    /// MiB of memory for all bodies that come in, are read, or belong to running requests; more wait, then get 503
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    body_memory: usize,
    /// Choices that a request may ask for
    #[arg(long, value_name = "N", default_value_t = 8)]
    max_n: usize,
    /// Seconds that a request may take, queue included [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Seconds that running requests have after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// What is logged on standard error; prompts and answers never are
    #[arg(long, value_enum, default_value = "info")]
    log: LogLevel,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogLevel {
    Off,
    Warn,
    Info,
    Debug,
}

impl Serve {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        crate::heap::bound();
        let level = match self.log {
            LogLevel::Off => tracing_subscriber::filter::LevelFilter::OFF,
            LogLevel::Warn => tracing_subscriber::filter::LevelFilter::WARN,
            LogLevel::Info => tracing_subscriber::filter::LevelFilter::INFO,
            LogLevel::Debug => tracing_subscriber::filter::LevelFilter::DEBUG,
        };
        tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_ansi(false).init();
        let keys = self.keys()?;
        let address = SocketAddr::new(self.host, self.port);
        let tls = self.tls_cert.as_deref().zip(self.tls_key.as_deref());
        let tls = tls.map(|(cert, key)| Tls::new(cert, key)).transpose()?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let opened = self.source.open()?;
        let gguf = opened.gguf.clone().context("serving needs a model file with its tokenizer")?;
        let stem = opened.path.as_deref().and_then(|p| p.file_stem());
        let name = self.alias.clone().or(stem.map(|s| s.to_string_lossy().into_owned())).unwrap_or_default();
        let vocab = opened.model.geometry().vocab;
        let text = TextModel::from_gguf(&gguf, name, vocab)?;
        let details = ModelDetails::from_gguf(&gguf, opened.model.geometry().context);
        let most = opened.model.geometry().context;
        let context = if self.context == 0 { most } else { self.context.min(most) };
        let device = self.device.load(&opened, (usize::from(self.slots), context))?;
        tracing::info!(device = device.info().name, model = opened.name, "loaded");
        let saved = self.slot_save_path.as_deref().map(|folder| {
            SavedSessions::new(folder, &opened.model, &device.info())
                .with_context(|| format!("{}: sessions cannot be saved there", folder.display()))
        });
        let saved = saved.transpose()?.map(Arc::new);
        let engine = Engine::new(device, opened.model.clone(), self.source.draft_mode(None));
        let metrics = Arc::new(Metrics::default());
        let most = engine.info().step_rows;
        if usize::from(self.slots) > most {
            let mend =
                if self.device.batch_invariant { "leave out --batch-invariant" } else { "a larger --chunk" };
            bail!(
                "--slots {}: a step of this device takes at most {most} rows; give --slots {most} or fewer, or {mend}",
                self.slots
            );
        }
        let usual = SlotOptions::default();
        // Chunks of a prompt that depend on what else runs would change its bits; long ones would keep decoding waiting then.
        let (idle_chunk, busy_chunk) = if self.device.batch_invariant {
            (usual.idle_chunk, usual.idle_chunk)
        } else {
            (engine.info().max_rows, usual.busy_chunk)
        };
        let options = SlotOptions {
            slots: usize::from(self.slots),
            context: self.context,
            queue: self.queue,
            host_bytes: self.cache << 20,
            idle_chunk,
            busy_chunk,
        };
        let slots = Slots::start(engine, options, metrics.clone())?;
        let generator = Generator {
            text: Arc::new(text),
            slots,
            metrics,
            max_n: self.max_n,
            timeout: self.timeout.map(Duration::from_secs),
            free_calls: self.free_calls,
            post: Default::default(),
        };
        let options = ServerOptions {
            keys,
            cors: self.cors,
            strict: self.strict_requests,
            body_limit: self.body_limit << 20,
            body_memory: self.body_memory << 20,
        };
        let intake = Intake::new(options.body_limit, options.body_memory);
        let app = Arc::new(App { generator, options, intake, started: Instant::now(), details, saved });
        // The one line on standard output, for scripts that wait for it.
        let grace = Duration::from_secs(self.grace);
        serve::run(app, address, grace, tls, |at| println!("listening on {scheme}://{at}"))?;
        Ok(())
    }

    fn keys(&self) -> Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        keys.extend(std::env::var("MUSER_API_KEY").ok());
        if let Some(file) = &self.api_key_file {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("{}: cannot be read", file.display()))?;
            keys.extend(
                text.lines()
                    .map(str::trim)
                    .filter(|l| !l.is_empty() && !l.starts_with('#'))
                    .map(String::from),
            );
        }
        keys.retain(|key| !key.is_empty());
        Ok(keys)
    }
}
