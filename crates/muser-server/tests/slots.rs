//! The scheduler over a scripted device that checks what it is asked: no holes, nothing that a ring has forgotten.
#![allow(clippy::unwrap_used)]

mod common;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use common::{MODEL, ScriptDevice, Server, Setup, Stage, encode, frames, outcome};
use muser_core::engine::DraftMode;
use muser_core::sample::{SampleError, Sampled, SamplerOptions, TokenMask};
use muser_core::session::Constraint;
use muser_core::{Engine, Flow};
use muser_server::metrics::Metrics;
use muser_server::slots::{End, Refusal, Report, Sink, SlotOptions, Slots, Work};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What a sink has seen.
#[derive(Debug, PartialEq)]
enum Seen {
    Started(usize),
    Token(u32),
    End(End, usize),
}

struct Recorder {
    name: usize,
    sender: Sender<(usize, Seen)>,
    wanted: Arc<AtomicBool>,
    stop_at: usize,
    count: usize,
}

impl Sink for Recorder {
    fn started(&mut self, cached: usize) {
        let _ = self.sender.send((self.name, Seen::Started(cached)));
    }
    fn token(&mut self, sampled: &Sampled) -> Flow {
        let _ = self.sender.send((self.name, Seen::Token(sampled.token)));
        self.count += 1;
        if self.count >= self.stop_at { Flow::Stop } else { Flow::Continue }
    }
    fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }
    fn finish(self: Box<Self>, end: End, report: Report) {
        let _ = self.sender.send((self.name, Seen::End(end, report.generated)));
    }
}

struct Bench {
    slots: Slots,
    stage: Arc<Stage>,
    sender: Sender<(usize, Seen)>,
    receiver: Receiver<(usize, Seen)>,
}

impl Bench {
    fn new(options: SlotOptions, max_rows: usize) -> Self {
        let stage = Arc::new(Stage::default());
        let device = Box::new(ScriptDevice::new(stage.clone(), max_rows));
        let engine = Engine::new(device, MODEL.0.clone(), DraftMode::Off);
        let slots = Slots::start(engine, options, Arc::new(Metrics::default())).unwrap();
        let (sender, receiver) = channel();
        Bench { slots, stage, sender, receiver }
    }

    fn work(&self, name: usize, prompt: Vec<u32>, max_tokens: usize) -> (Work, Arc<AtomicBool>) {
        let wanted = Arc::new(AtomicBool::new(true));
        let recorder = Recorder {
            name,
            sender: self.sender.clone(),
            wanted: wanted.clone(),
            stop_at: usize::MAX,
            count: 0,
        };
        let work = Work {
            marks: vec![prompt.len()],
            prompt,
            options: SamplerOptions::greedy(),
            constraint: None,
            max_tokens,
            reuse: true,
            draft_rows: usize::MAX,
            client: 0,
            deadline: None,
            sink: Box::new(recorder),
        };
        (work, wanted)
    }

    fn next(&self) -> (usize, Seen) {
        self.receiver.recv_timeout(Duration::from_secs(20)).unwrap()
    }

    /// Waits for the ends of `n` works; their names in order.
    fn ends(&self, n: usize) -> Vec<usize> {
        let mut names = vec![];
        while names.len() < n {
            if let (name, Seen::End(..)) = self.next() {
                names.push(name);
            }
        }
        names
    }
}

fn options(slots: usize) -> SlotOptions {
    SlotOptions { slots, context: 4096, queue: 100, host_bytes: 64 << 20, ..SlotOptions::default() }
}

/// A prompt of `n` ordinary tokens that begins in its own way.
fn prompt(kind: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 300 + (i * 7 + kind * 1013) % 5000).collect()
}

#[test]
fn decoding_waits_for_one_short_chunk_at_most() {
    let bench = Bench::new(options(2), 512);
    let (a, _) = bench.work(0, prompt(0, 10), 40);
    bench.slots.submit(vec![a]).unwrap();
    while !matches!(bench.next().1, Seen::Token(_)) {}
    let (b, _) = bench.work(1, prompt(1, 1000), 3);
    bench.slots.submit(vec![b]).unwrap();
    bench.ends(2);
    let passes = bench.stage.passes.lock().unwrap().clone();
    let first = passes[0][0].0;
    let last_of_a = passes.iter().rposition(|p| p.iter().any(|(seq, _)| *seq == first)).unwrap();
    let mut since = 0;
    for pass in &passes[1..=last_of_a] {
        if pass.iter().any(|(seq, _)| *seq == first) {
            since = 0;
        } else {
            since += pass.iter().map(|(_, n)| n).sum::<usize>();
        }
        assert!(since <= 64, "{since} rows of another prompt before a decode step");
    }
    // Alone, a prompt goes in chunks of 512.
    bench.stage.passes.lock().unwrap().clear();
    let (c, _) = bench.work(2, prompt(2, 1000), 1);
    bench.slots.submit(vec![c]).unwrap();
    bench.ends(1);
    let rows: Vec<usize> = bench.stage.passes.lock().unwrap().iter().map(|p| p[0].1).collect();
    assert_eq!(rows, [512, 488]);
}

/// Allows everything, and notes how far the device was when a mask was first asked for.
struct Clock {
    stage: Arc<Stage>,
    mask: TokenMask,
    asked: bool,
    /// Passes begun, and passes whose logits had been read.
    seen: Sender<(usize, usize)>,
}

impl Constraint for Clock {
    fn mask(&mut self) -> Result<Option<&TokenMask>, SampleError> {
        if !std::mem::replace(&mut self.asked, true) {
            let passes = self.stage.passes.lock().unwrap().len();
            let _ = self.seen.send((passes, self.stage.read.load(Ordering::Relaxed)));
        }
        Ok(Some(&self.mask))
    }
    fn accept(&mut self, _: u32) -> Result<(), SampleError> {
        self.asked = false;
        Ok(())
    }
}

#[test]
fn masks_are_made_before_logits_are_read() {
    let bench = Bench::new(options(1), 64);
    let (seen, all) = channel();
    let vocab = MODEL.0.geometry().vocab;
    let mut mask = TokenMask::none(vocab);
    mask.set_words(&vec![u32::MAX; vocab.div_ceil(32)]);
    let (mut work, _) = bench.work(0, prompt(0, 20), 10);
    work.constraint = Some(Box::new(Clock { stage: bench.stage.clone(), mask, asked: false, seen }));
    bench.slots.submit(vec![work]).unwrap();
    bench.ends(1);
    let all: Vec<_> = all.try_iter().collect();
    // One for the prompt's pass and one for each decode step: the pass has begun, its logits are not yet read.
    assert_eq!(all, (1..=10).map(|pass| (pass, pass - 1)).collect::<Vec<_>>());
}

#[test]
fn sessions_share_their_steps() {
    let bench = Bench::new(options(4), 64);
    bench.stage.close_gate();
    let works = (0..4).map(|i| bench.work(i, prompt(i as u32, 20), 30).0).collect();
    bench.slots.submit(works).unwrap();
    bench.stage.open_gate();
    bench.ends(4);
    let passes = bench.stage.passes.lock().unwrap();
    assert!(passes.iter().filter(|p| p.len() == 4).count() >= 20, "{passes:?}");
}

#[test]
fn fewest_running_first() {
    let bench = Bench::new(options(2), 64);
    bench.stage.close_gate();
    // Client 1 asks for five at once, client 2 for one after them.
    let client = |name: usize, client: u64| {
        let (mut work, _) = bench.work(name, prompt(name as u32, 20), 5);
        work.client = client;
        work
    };
    bench.slots.submit((0..5).map(|i| client(i, 1)).collect()).unwrap();
    bench.slots.submit(vec![client(9, 2)]).unwrap();
    bench.stage.open_gate();
    let order = bench.ends(6);
    let place = order.iter().position(|n| *n == 9).unwrap();
    assert!(place <= 2, "{order:?}");
}

#[test]
fn a_full_queue_refuses() {
    let bench = Bench::new(SlotOptions { queue: 2, ..options(1) }, 64);
    bench.stage.close_gate();
    let submit = |name: usize| bench.slots.submit(vec![bench.work(name, prompt(name as u32, 20), 5).0]);
    submit(0).unwrap();
    // The first one leaves the queue as soon as it is admitted.
    while bench.slots.waiting() > 0 {
        std::thread::yield_now();
    }
    submit(1).unwrap();
    submit(2).unwrap();
    assert_eq!(submit(3), Err(Refusal::Full));
    bench.stage.open_gate();
    bench.ends(3);
    submit(4).unwrap();
    bench.ends(1);
}

#[test]
fn the_unwanted_and_the_late_free_their_slots() {
    let bench = Bench::new(options(1), 64);
    bench.stage.script("long", (0..3000).map(|i| 300 + i % 5000).collect());
    let (running, wanted) = bench.work(0, encode("[[long]]"), 3000);
    let (queued, queued_wanted) = bench.work(1, prompt(1, 20), 5);
    let (mut late, _) = bench.work(2, prompt(2, 20), 5);
    late.deadline = Some(Instant::now());
    let (last, _) = bench.work(3, prompt(3, 20), 5);
    bench.slots.submit(vec![running]).unwrap();
    while !matches!(bench.next().1, Seen::Token(_)) {}
    bench.slots.submit(vec![queued, late, last]).unwrap();
    queued_wanted.store(false, Ordering::Relaxed);
    wanted.store(false, Ordering::Relaxed);
    let mut ends = vec![];
    while ends.len() < 4 {
        if let (name, Seen::End(end, generated)) = bench.next() {
            ends.push((name, end, generated));
        }
    }
    ends.sort_by_key(|(name, ..)| *name);
    assert!(ends[0].2 < 3000, "the unwanted one was computed to its end");
    assert_eq!((&ends[1].1, ends[1].2), (&End::Stop, 0));
    assert_eq!((&ends[2].1, ends[2].2), (&End::Deadline, 0));
    assert_eq!(ends[3].1, End::Length);
    assert!(bench.slots.status().iter().all(|s| !s.busy));
}

#[test]
fn a_broken_device_fails_requests_and_frees_slots() {
    let bench = Bench::new(options(2), 64);
    bench.stage.broken.store(true, Ordering::Relaxed);
    bench.slots.submit((0..3).map(|i| bench.work(i, prompt(i as u32, 20), 5).0).collect()).unwrap();
    let mut failed = 0;
    while failed < 3 {
        if let (_, Seen::End(end, 0)) = bench.next() {
            assert!(matches!(&end, End::Failed(why) if why.contains("the stage is broken")), "{end:?}");
            failed += 1;
        }
    }
    bench.stage.broken.store(false, Ordering::Relaxed);
    bench.slots.submit(vec![bench.work(9, prompt(9, 20), 5).0]).unwrap();
    assert_eq!(bench.ends(1), [9]);
    assert!(*bench.stage.open_sequences.lock().unwrap() <= 2);
}

#[test]
fn shutting_down_lets_running_work_end() {
    let bench = Bench::new(options(1), 64);
    bench.stage.close_gate();
    bench.slots.submit(vec![bench.work(0, prompt(0, 20), 50).0]).unwrap();
    let stage = bench.stage.clone();
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        stage.open_gate();
    });
    bench.slots.shut_down(Duration::from_secs(20));
    opener.join().unwrap();
    let seen: Vec<Seen> = bench.receiver.try_iter().map(|(_, seen)| seen).collect();
    assert_eq!(seen.last(), Some(&Seen::End(End::Length, 50)));
    assert_eq!(bench.slots.submit(vec![bench.work(1, prompt(1, 20), 5).0]), Err(Refusal::ShuttingDown));
    assert!(!bench.slots.alive());
}

/// Cached tokens of one work that is run to its end.
fn cached(bench: &Bench, prompt: Vec<u32>, marks: Vec<usize>, max_tokens: usize) -> usize {
    let (mut work, _) = bench.work(0, prompt, max_tokens);
    work.marks = marks;
    bench.slots.submit(vec![work]).unwrap();
    let Seen::Started(cached) = bench.next().1 else { panic!("no start") };
    bench.ends(1);
    cached
}

#[test]
fn a_conversation_goes_on_where_it_was_even_after_the_ring_has_wrapped() {
    let window = MODEL.0.geometry().window;
    for slots in [1, 3] {
        let bench = Bench::new(options(slots), 64);
        bench.stage.script("think", (0..3000).map(|i| 300 + i % 5000).collect());
        // System message, question, then an answer that is longer than what rings hold; the next turn drops it.
        let system = prompt(5, window + 100);
        let turn = |n: u32| [&system[..], &encode(&format!(" question {n} [[think]]"))].concat();
        let marks = |p: &[u32]| vec![system.len(), p.len()];
        let first = turn(1);
        assert_eq!(cached(&bench, first.clone(), marks(&first), window + 400), 0);
        let second = [&first[..], &encode(" short answer, next question [[think]]")].concat();
        assert_eq!(
            cached(&bench, second.clone(), marks(&second), window + 400),
            first.len(),
            "{slots} slots"
        );
        // Another conversation with the same system message.
        let other = [&system[..], &encode(" something else")].concat();
        assert_eq!(cached(&bench, other.clone(), marks(&other), 5), system.len(), "{slots} slots");
        // And the first one again.
        let third = [&second[..], &encode(" once more")].concat();
        assert_eq!(cached(&bench, third.clone(), marks(&third), 5), second.len(), "{slots} slots");
    }
}

#[test]
fn without_reuse_nothing_is_cached() {
    let bench = Bench::new(options(1), 64);
    cached(&bench, prompt(1, 100), vec![], 3);
    let (mut work, _) = bench.work(0, prompt(1, 100), 3);
    work.reuse = false;
    bench.slots.submit(vec![work]).unwrap();
    assert_eq!(bench.next().1, Seen::Started(0));
}

/// Prompts that branch, cancels, evictions, in random order: the device would panic on any wrong state, every work ends,
/// and what comes out depends on the prompt alone.
#[test]
fn random_traffic() {
    let bench = Bench::new(SlotOptions { host_bytes: 10 << 20, ..options(3) }, 32);
    let script: Vec<u32> = (0..600).map(|i| 300 + i * 3 % 5000).collect();
    bench.stage.script("s", script.clone());
    let mut random = 7u64;
    let mut roll = |n: usize| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize % n
    };
    let mut flags = vec![];
    let mut expected = vec![];
    for name in 0..150 {
        let mut tokens = prompt(roll(3) as u32, 1 + roll(500));
        tokens.extend(encode(" [[s]]"));
        if roll(2) == 0 {
            tokens.extend(&script[..roll(400)]);
        }
        let most = if roll(4) == 0 { 400 } else { 30 };
        let max = 1 + roll(most);
        let written = tokens.len();
        let start = tokens.iter().rposition(|t| encode(" [[s]]").last() == Some(t)).unwrap() + 1;
        expected.push((written - start, max));
        let (mut work, wanted) = bench.work(name, tokens, max);
        work.marks.push(work.prompt.len() / 2);
        work.reuse = roll(10) > 0;
        flags.push(wanted);
        bench.slots.submit(vec![work]).unwrap();
        if roll(3) == 0 {
            let one = roll(flags.len());
            flags[one].store(false, Ordering::Relaxed);
        }
        while bench.slots.waiting() > 20 {
            std::thread::yield_now();
        }
    }
    let mut tokens: Vec<Vec<u32>> = vec![vec![]; 150];
    let mut open = 150;
    while open > 0 {
        match bench.next() {
            (name, Seen::Token(token)) => tokens[name].push(token),
            (name, Seen::End(end, _)) => {
                let cancelled = !flags[name].load(Ordering::Relaxed);
                assert!(end == End::Length || cancelled && end == End::Stop, "{name}: {end:?}");
                open -= 1;
            }
            _ => {}
        }
    }
    let eot = MODEL.1.special("<|eot|>").unwrap();
    for (name, got) in tokens.iter().enumerate() {
        let (start, max) = expected[name];
        let want: Vec<u32> = (start..start + max).map(|i| script.get(i).copied().unwrap_or(eot)).collect();
        assert_eq!(got[..], want[..got.len()], "work {name}");
    }
    assert!(bench.slots.status().iter().all(|s| !s.busy));
    assert!(*bench.stage.open_sequences.lock().unwrap() <= 3);
}

// Over HTTP.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_server_says_so_in_every_protocol() {
    let server = Setup {
        slots: SlotOptions { slots: 1, queue: 1, context: 1024, ..SlotOptions::default() },
        ..Setup::default()
    }
    .start();
    server.stage.close_gate();
    let app = server.app.clone();
    let ask = || json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": false});
    let start = || {
        use tower::ServiceExt;
        let request = Request::post("/v1/chat/completions").body(Body::from(ask().to_string())).unwrap();
        tokio::spawn(muser_server::routes::router(app.clone()).oneshot(request))
    };
    let slots = &app.generator.slots;
    // One runs, one waits.
    let first = start();
    while app.generator.metrics.prompt_tokens.get() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let second = start();
    while slots.waiting() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for (path, at) in [
        ("/v1/chat/completions", "/error/message"),
        ("/v1/messages", "/error/message"),
        ("/api/chat", "/error"),
    ] {
        let (status, body) = server.post(path, ask()).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert!(body.pointer(at).unwrap().as_str().unwrap().contains("queue is full"), "{path}: {body}");
    }
    server.stage.open_gate();
    for running in [first, second] {
        assert_eq!(running.await.unwrap().unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_its_slot() {
    let server = Server::new();
    server.script("long", &format!(" to=user<|message|>{}", "word ".repeat(1500)));
    let body = json!({"messages": [{"role": "user", "content": "[[long]]"}], "stream": true});
    for _ in 0..3 {
        use tower::ServiceExt;
        let request = Request::post("/v1/chat/completions").body(Body::from(body.to_string())).unwrap();
        let response = muser_server::routes::router(server.app.clone()).oneshot(request).await.unwrap();
        let mut stream = response.into_body().into_data_stream();
        let first = std::future::poll_fn(|cx| {
            use tokio_stream::Stream;
            std::pin::Pin::new(&mut stream).poll_next(cx)
        });
        assert!(first.await.unwrap().is_ok());
        drop(stream);
    }
    let start = Instant::now();
    while server.app.generator.slots.status().iter().any(|s| s.busy) {
        assert!(start.elapsed() < Duration::from_secs(10), "a slot is stuck");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(server.app.generator.metrics.generated_tokens.get() < 4500);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_failures_are_proper_errors() {
    let server = Server::new();
    let ask = |stream: bool| json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": stream});
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
    server.stage.broken.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let (status, body) = server.post("/v1/chat/completions", ask(false)).await;
        assert_eq!(
            (status, body["error"]["type"].as_str()),
            (StatusCode::INTERNAL_SERVER_ERROR, Some("server_error"))
        );
    }
    assert_eq!(server.get("/health").await.0, StatusCode::SERVICE_UNAVAILABLE);
    let (_, text) = server.post_text("/v1/chat/completions", &ask(true).to_string()).await;
    let last: Vec<Value> = frames(&text);
    assert!(last.last().unwrap()["error"]["message"].is_string(), "{text}");
    server.stage.broken.store(false, Ordering::Relaxed);
    server.script("ok", " to=user<|message|>Fine.<|eot|>");
    assert_eq!(outcome(&server.chat("ok", json!({})).await).1, "Fine.");
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
}

/// An agent writes a file back: the call, which its schema and the turn's grammar constrain, is drafted by lookup.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_repeats_the_prompt_is_drafted_by_lookup() {
    let code = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return area(width, height) * depth\n";
    let call = format!(
        " to=write<|message|><atem:function_calls>\n<atem:invoke name=\"write\">\n<atem:parameter name=\"text\">{code}</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"
    );
    let parameters =
        json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
    let tools = json!([{"type": "function", "function": {"name": "write", "description": "", "parameters": parameters}}]);
    let messages = json!([{"role": "user", "content": format!("Write this again: {code}[[call]]")}]);
    let ask = json!({"messages": messages, "tools": tools, "temperature": 0});
    let mut answers = vec![];
    for draft in [DraftMode::Off, DraftMode::Fixed(6)] {
        let server = Setup { draft, ..Setup::default() }.start();
        server.script("call", &call);
        let (status, body) = server.post("/v1/chat/completions", ask.clone()).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        let (_, metrics) = server.get("/metrics").await;
        answers.push((outcome(&body), body["timings"].clone(), metrics));
        let mut plain = ask.clone();
        plain["speculative.n_max"] = 0.into();
        let (_, body) = server.post("/v1/chat/completions", plain).await;
        assert_eq!((&body["timings"]["draft_n"], outcome(&body)), (&json!(0), answers[0].0.clone()));
    }
    let [(plain, _, none), (drafted, timings, metrics)] = &answers[..] else { unreachable!() };
    assert_eq!(plain, drafted);
    assert_eq!(drafted.2[0].1, json!({"text": code}));
    assert!(none.contains("muser_lookup_drafted_tokens_total 0\n"));
    let [proposed, accepted] = ["lookup_n", "lookup_n_accepted"].map(|key| timings[key].as_u64().unwrap());
    assert_eq!([&timings["draft_n"], &timings["draft_n_accepted"]], [&json!(proposed), &json!(accepted)]);
    assert!(accepted > 20, "{timings}");
    for (name, value) in [("drafted", proposed), ("accepted", accepted)] {
        assert!(metrics.contains(&format!("muser_lookup_{name}_tokens_total {value}\n")), "{metrics}");
        assert!(metrics.contains(&format!("muser_{name}_tokens_total {value}\n")), "{metrics}");
    }
}
