//! `muser receipt` and `muser verify`.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Temp, fixture, muser, tiny};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A receipt of two short prompts of the tiny model.
fn receipt(name: &str, extra: &[&str]) -> Temp {
    let file = Temp::new(name);
    let args =
        ["receipt", "-m", &tiny(), "--tokens", "1,2,3,4,5,6,7", "--tokens", "900,5", "-o", file.path()];
    muser(&[&args[..], extra].concat()).ok();
    file
}

fn read(file: &Temp) -> Value {
    serde_json::from_slice(&std::fs::read(&file.0).unwrap()).unwrap()
}

fn sha256sum(path: &str) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_string()
}

#[test]
fn a_receipt_names_model_tokenizer_template_and_lane() {
    let receipt = read(&receipt("names.json", &[]));
    assert_eq!(receipt["format"], 1);
    assert_eq!(receipt["model"]["file"], "tiny-Q8_0.gguf");
    assert_eq!(receipt["model"]["sha256"], sha256sum(&tiny()));
    assert_eq!(receipt["model"]["template"], sha256sum(&fixture("chat/muse-glimmer.jinja")));
    assert_eq!((&receipt["lane"], &receipt["kv"]), (&"strict".into(), &"f16".into()));
    let prompt = &receipt["prompts"][0];
    assert_eq!(prompt["tokens"], serde_json::json!([1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(prompt["logits"].as_array().unwrap().len(), 7);
    assert_eq!(prompt["residuals"].as_array().unwrap().len(), 9);
}

#[test]
fn digests_of_logits_are_those_of_the_logits_command() {
    let receipt = read(&receipt("digests.json", &[]));
    let npy = Temp::new("digests.npy");
    let args = ["logits", "-m", &tiny(), "--tokens", "900,5", "--lane", "strict", "-o", npy.path()];
    muser(&args).ok();
    let bytes = std::fs::read(&npy.0).unwrap();
    let row = 1024 * 4;
    let last = Temp::with("digests.row", &bytes[bytes.len() - row..]);
    assert_eq!(receipt["prompts"][1]["logits"][1], sha256sum(last.path()));
    let both = Temp::with("digests.rows", &bytes[bytes.len() - 2 * row..]);
    let spanned = read(&self::receipt("spanned.json", &["--span", "2"]));
    assert_eq!(spanned["prompts"][1]["logits"][0], sha256sum(both.path()));
}

#[test]
fn any_device_and_setting_verifies_a_strict_receipt() {
    let file = receipt("any.json", &["--chunk", "3"]);
    let verify = ["verify", "-m", &tiny(), "--against", file.path()];
    for extra in
        [&[][..], &["--isa", "scalar", "--threads", "1"], &["--chunk", "1"], &["--device", "reference"]]
    {
        let out = muser(&[&verify[..], extra].concat()).ok();
        assert_eq!(out.matches("tokens: the same").count(), 2, "{out}");
    }
    let built_in = muser(&["verify", "-m", &tiny(), "--devices", "cpu,reference", "--json"]).json();
    let tokens: Vec<&Value> = built_in["prompts"].as_array().unwrap().iter().map(|p| &p["tokens"]).collect();
    assert_eq!(tokens, [24, 100, 300]);
    assert!(built_in["prompts"].as_array().unwrap().iter().all(|p| p["same"] == true));
}

/// The serving lane leaves the reference at once, and by less than its rounding to 8 bits allows.
#[test]
fn two_devices_that_differ_are_told_apart() {
    let args =
        ["verify", "-m", &tiny(), "--devices", "cpu,reference", "--lane", "serving", "--tokens", "1,2,3"];
    let ran = muser(&[&args[..], &["--json"]].concat());
    assert_eq!(ran.code, 1);
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let difference = &report["prompts"][0]["difference"];
    assert_eq!((&difference["layer"], &difference["name"]), (&0.into(), &"attn.q+k+v+gate".into()));
    let values = |i: usize| difference["values"][i].as_f64().unwrap();
    assert!(values(0) != values(1) && (values(0) - values(1)).abs() < 0.1, "{difference}");
    muser(&[&args[..], &["--tolerance", "100"]].concat()).ok();
}

/// Replaces one digest by another.
fn forged(name: &str, path: &[&str], at: usize) -> Temp {
    let mut receipt = read(&receipt(name, &[]));
    let mut digests = &mut receipt["prompts"][0];
    for key in path {
        digests = &mut digests[*key];
    }
    digests[at] = "0".repeat(64).into();
    Temp::with(&format!("forged-{name}"), receipt.to_string())
}

#[test]
fn the_first_layer_or_position_that_differs_is_named() {
    for (name, path, at, words) in [
        ("embedding.json", "residuals", 0, "embedding differs"),
        ("layer.json", "residuals", 4, "layer 3 is the first"),
        ("logits.json", "logits", 5, "logits of position 5 differ"),
    ] {
        let file = forged(name, &[path], at);
        let ran = muser(&["verify", "-m", &tiny(), "--against", file.path()]);
        assert_eq!(ran.code, 1, "{}", ran.out);
        assert!(ran.out.contains(words) && ran.out.contains("2 tokens: the same"), "{}", ran.out);
        assert!(ran.err.contains("1 of 2 prompts differ"), "{}", ran.err);
    }
}

#[test]
fn receipts_that_do_not_fit_are_refused() {
    let file = receipt("refused.json", &[]);
    let serving = receipt("refused-serving.json", &["--lane", "serving", "--device", "cpu"]);
    let text = std::fs::read_to_string(&file.0).unwrap();
    let digest = read(&file)["prompts"][0]["logits"][0].as_str().unwrap().to_string();
    let broken = |i: usize, from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Temp::with(&format!("broken-{i}.json"), text.replacen(from, to, 1))
    };
    let cases = [
        (broken(0, "{", ""), "not JSON"),
        (broken(1, "\"format\":1,", ""), "no receipt"),
        (broken(2, "\"format\":1", "\"format\":2"), "reads 1"),
        (broken(3, "\"lane\":\"strict\"", "\"lane\":\"fast\""), "fast"),
        (broken(4, "\"kv\":\"f16\"", "\"kv\":\"f9\""), "f9"),
        (broken(5, &digest, "xyz"), "no SHA-256"),
        (broken(6, "[1,2,3,4,5,6,7]", "[1,2,3,4,5,6]"), "digests"),
        (broken(7, "[1,2,3,4,5,6,7]", "[1,2,3,4,5,6,1024]"), "vocabulary"),
        (broken(8, "[1,2,3,4,5,6,7]", "[]"), "tokens"),
        (broken(9, "[1,2,3,4,5,6,7]", "[1,2,3,4,5,6,-7]"), "broken"),
        (broken(10, "\"span\":1", "\"span\":0"), "at least one"),
        (broken(11, "\"span\":1", "\"wingspan\":1"), "broken"),
    ];
    for (file, word) in &cases {
        let error = muser(&["verify", "-m", &tiny(), "--against", file.path()]).error(1);
        assert!(error.contains(word), "{word}: {error}");
    }
    for (args, word) in [
        (&["-m", &fixture("gguf/tiny-mix.gguf"), "--against", file.path()][..], "another model"),
        (&["-m", &tiny(), "--against", file.path(), "--lane", "serving"], "strict lane"),
        (&["-m", &tiny(), "--against", serving.path(), "--lane", "strict"], "serving lane"),
        (&["-m", &tiny(), "--against", "nowhere.json"], "nowhere.json"),
        (&["-m", &tiny(), "--devices", "cpu,cpu", "--tokens", "1024"], "1024"),
    ] {
        let error = muser(&[&["verify"], args].concat()).error(1);
        assert!(error.contains(word), "{args:?}: {error}");
    }
    for args in [
        &["verify"][..],
        &["verify", "--devices", "cpu"],
        &["verify", "--devices", "cpu,tpu"],
        &["verify", "--devices", "cpu,reference", "--tolerance", "-1"],
        &["verify", "--devices", "cpu,reference", "--against", "x"],
        &["receipt", "--span", "0"],
    ] {
        muser(args).error(2);
    }
    // The serving lane of the CPU holds on every processor.
    let args = ["verify", "-m", &tiny(), "--device", "cpu", "--against", serving.path()];
    muser(&[&args[..], &["--isa", "scalar", "--threads", "1"]].concat()).ok();
}

/// The receipts of tests/receipts with their model files.
fn kept() -> [(PathBuf, String); 4] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    [
        ("glimmer-mini", "models/glimmer-mini-Q8_0.gguf"),
        ("tiny-Q8_0", "tests/fixtures/gguf/tiny-Q8_0.gguf"),
        ("tiny-Q4_K_M", "tests/fixtures/gguf/tiny-Q4_K_M-scalar.gguf"),
        ("tiny-mix", "tests/fixtures/gguf/tiny-mix.gguf"),
    ]
    .map(|(name, model)| {
        (root.join(format!("tests/receipts/{name}.json")), root.join(model).to_str().unwrap().to_string())
    })
}

/// The strict lane gives the bits that it gave when the receipts were made. Where that is meant to change:
/// scripts/update-receipts.
#[test]
fn the_strict_lane_has_not_drifted() {
    for (receipt, model) in kept() {
        // Scalar code is tens of times slower: on one model of every type.
        let scalar = model.ends_with("tiny-mix.gguf");
        let settings = [("avx512", "2"), ("avx2", "1"), ("scalar", "2")];
        for (isa, threads) in settings {
            let has = muser_cpu::Isa::from_name(isa).is_some_and(muser_cpu::Isa::available);
            if !has || (isa == "scalar" && !scalar) {
                continue;
            }
            let args = ["verify", "-m", &model, "--device", "cpu", "--against", receipt.to_str().unwrap()];
            let ran = muser(&[&args[..], &["--isa", isa, "--threads", threads]].concat());
            assert_eq!(ran.code, 0, "{isa}, {threads} threads: {}{}", ran.out, ran.err);
        }
    }
}
