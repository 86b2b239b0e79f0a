//! Commands that explain: what they print is what they say they print.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Temp, command, fixture, muser, tiny};
use serde_json::Value;

#[test]
fn inspect_knows_both_forms_of_the_window_pattern() {
    let report = muser(&["inspect", "-m", &tiny(), "--json"]).json();
    let g = &report["geometry"];
    assert_eq!((&g["layers"], &g["hidden"], &g["window"]), (&8.into(), &256.into(), &32.into()));
    assert_eq!(g["full_layers"], serde_json::json!([3, 7]));
    assert_eq!(report["oddities"], serde_json::json!([]));
    let scalar = muser(&["inspect", "-m", &fixture("gguf/tiny-Q4_K_M-scalar.gguf"), "--json"]).json();
    assert_eq!(scalar["geometry"], report["geometry"]);
    assert!(scalar["oddities"][0].as_str().unwrap().contains("sliding_window_pattern"));
    let template = muser(&["inspect", "-m", &tiny(), "--template"]).ok();
    assert_eq!(template, std::fs::read_to_string(fixture("chat/muse-glimmer.jinja")).unwrap());
    let text = muser(&["inspect"]).ok();
    assert!(text.contains("drafter") && text.contains("glimmer-mini-dflash-Q8_0.gguf"), "{text}");
}

#[test]
fn kernels_cover_every_step_of_the_plan() {
    // Nothing is loaded, so CUDA is listed without a card.
    let shape = ["--geometry", "muse-glimmer-30b", "--draft", "auto"];
    for (device, lane, model) in [
        ("cpu", "serving", &[][..]),
        ("cpu", "strict", &[]),
        ("cuda", "serving", &shape),
        ("cuda", "strict", &shape),
    ] {
        for (pass, rows) in
            ["target", "inject", "draft"].iter().flat_map(|p| ["1", "16", "512"].map(|n| (p, n)))
        {
            let args =
                ["kernels", "--json", "--pass", pass, "--rows", rows, "--device", device, "--lane", lane];
            let table = muser(&[&args[..], model].concat()).json();
            let kernels = table["kernels"].as_array().unwrap();
            assert!(!kernels.is_empty());
            for kernel in kernels {
                let ladder = kernel["ladder"].as_array().unwrap();
                let taken: Vec<&Value> = ladder.iter().filter(|l| l["taken"] == true).collect();
                assert_eq!(taken.len(), 1, "{kernel}");
                assert_eq!(taken[0]["kernel"], kernel["kernel"]);
                let source = kernel["library"].as_str().unwrap().split(' ').next().unwrap();
                let file = format!(
                    "{}/../{source}/{}",
                    env!("CARGO_MANIFEST_DIR"),
                    kernel["file"].as_str().unwrap()
                );
                assert!(std::path::Path::new(&file).is_file(), "{file}");
            }
        }
    }
    let why = muser(&["kernels", "--why"]).ok();
    assert!(why.contains("->") && why.contains("lm-head"), "{why}");
}

#[test]
fn the_released_geometry_needs_no_weights_to_be_explained() {
    let args =
        ["kernels", "--geometry", "muse-glimmer-30b", "--quant", "q4_k_m", "--device", "cpu", "--json"];
    let table = muser(&args).json();
    let bytes: f64 = table["kernels"]
        .as_array()
        .unwrap()
        .iter()
        .map(|k| k["memory_bytes"].as_f64().unwrap() * (k["layers"].as_array().unwrap().len().max(1)) as f64)
        .sum();
    assert!((16.0e9..16.4e9).contains(&bytes), "{bytes}");
}

#[test]
fn trace_accounts_for_every_kernel() {
    let (chrome, svg) = (Temp::new("trace.json"), Temp::new("trace.svg"));
    let args = ["trace", "--json", "--rows", "3", "--depth", "5", "--repeat", "2", "--device", "cpu"];
    let files = ["--chrome", chrome.path(), "--svg", svg.path()];
    let report = muser(&[&args[..], &files].concat()).json();
    let kernels = report["kernels"].as_array().unwrap();
    let calls: u64 = kernels.iter().map(|k| k["calls"].as_u64().unwrap()).sum();
    let sum = |values: &mut dyn Iterator<Item = &Value>| values.map(|v| v.as_f64().unwrap()).sum::<f64>();
    let by_kernel = sum(&mut kernels.iter().map(|k| &k["seconds"]));
    let by_stage = sum(&mut report["stages"].as_object().unwrap().values());
    assert!((by_kernel - by_stage).abs() < 1e-9 && by_kernel > 0.0);
    let events: Value = serde_json::from_str(&std::fs::read_to_string(&chrome.0).unwrap()).unwrap();
    assert_eq!(events["traceEvents"].as_array().unwrap().len() as u64, calls);
    let picture = std::fs::read_to_string(&svg.0).unwrap();
    assert_eq!(picture.matches("<title>").count(), kernels.len());
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
}

#[test]
fn bench_prints_one_object() {
    let args = [
        "bench",
        "--json",
        "--prefill",
        "24",
        "--decode",
        "4",
        "--depth",
        "8",
        "--groups",
        "2,3",
        "--repeat",
        "1",
    ];
    let report = muser(&args).json();
    for key in [
        "prefill_tok_s",
        "decode_tok_s",
        "read_gb_s",
        "decode_gb_s",
        "decode_share",
        "load_seconds",
        "peak_tops",
    ] {
        assert!(report[key].as_f64().is_some_and(|v| v > 0.0), "{key}: {report}");
    }
    let groups = report["groups"].as_array().unwrap();
    assert!(groups.len() == 2 && groups.iter().all(|g| g["steps_of_one"].as_f64().is_some_and(|v| v > 0.0)));
    assert_eq!(report["drafting"]["rows"], 16);
    let none =
        muser(&["bench", "--json", "--prefill", "0", "--decode", "2", "--repeat", "1", "--draft", "off"])
            .json();
    assert_eq!((&none["prefill_tok_s"], &none["drafting"]), (&Value::Null, &Value::Null));
}

#[test]
fn perplexity_stores_and_compares_logits() {
    let text = Temp::with("text.txt", "It was a fine morning in spring, and the sun was warm. ".repeat(30));
    let stored = Temp::new("stored.npy");
    let args = ["perplexity", text.path(), "--window", "64", "--windows", "2", "--json"];
    let first = muser(&[&args[..], &["--store", stored.path()]].concat()).json();
    let again = muser(&[&args[..], &["--against", stored.path()]].concat()).json();
    assert_eq!(first["positions"], 62);
    assert_eq!(first["perplexity"], again["perplexity"]);
    assert!(first["kl_mean"].is_null() && again["kl_mean"].as_f64().unwrap().abs() < 1e-9);
    assert_eq!(again["same_best"], 1.0);
    let other = ["perplexity", text.path(), "--window", "64", "--windows", "1", "--against", stored.path()];
    assert!(muser(&other).error(1).contains("62 x 6400"));
}

#[test]
fn doctor_finds_nothing_wrong_with_the_shipped_model() {
    let report = muser(&["doctor", "--json"]).json();
    for check in report["checks"].as_array().unwrap() {
        assert_ne!(check["status"], "fails", "{check}");
    }
    let ran = muser(&["doctor", "-m", "nowhere.gguf"]);
    assert_eq!(ran.code, 1);
    assert!(ran.out.contains("mend") && ran.out.contains("nowhere.gguf"), "{}", ran.out);
}

#[test]
fn help_and_completions_exist_for_every_command() {
    let help = muser(&["--help"]).ok();
    let commands = help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let names: Vec<&str> = commands.filter_map(|l| l.split_whitespace().next()).collect();
    assert!(names.len() >= 14, "{names:?}");
    let bash = muser(&["completions", "bash"]).ok();
    for name in names.iter().filter(|n| **n != "help") {
        assert!(muser(&[name, "--help"]).ok().contains("Usage: muser"), "{name}");
        assert!(bash.contains(name), "{name}");
    }
    for shell in ["elvish", "fish", "powershell", "zsh"] {
        assert!(muser(&["completions", shell]).ok().contains("muser"), "{shell}");
    }
    let nothing = muser(&[]).ok();
    assert!(nothing.contains("muser run") && nothing.lines().count() < 12, "{nothing}");
}

#[test]
fn the_environment_names_a_model() {
    let output = command(&["inspect", "--json"]).env("MUSER_MODEL", tiny()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["geometry"]["vocab"], 1024);
}

#[test]
fn generated_pages_are_what_the_binary_prints() {
    for page in ["kernel-table", "lanes"] {
        let path = format!("{}/../../docs/{page}.md", env!("CARGO_MANIFEST_DIR"));
        let printed = muser(&["docs", page]).ok();
        let kept = std::fs::read_to_string(&path).unwrap();
        assert!(printed == kept, "docs/{page}.md is old: run scripts/update-docs");
    }
}
