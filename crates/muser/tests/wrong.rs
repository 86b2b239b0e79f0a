//! Wrong usage: one clear error, the right exit code, no panic.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Temp, muser, muser_with, tiny};
use muser_format::{Gguf, GgufWriter};

const DRAFTER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/glimmer-mini-dflash-Q8_0.gguf");

#[test]
fn files_that_cannot_be_models_are_named() {
    let cut = Temp::with("cut.gguf", &std::fs::read(tiny()).unwrap()[..100_000]);
    let text = Temp::with("text.gguf", "not a model");
    for (file, words) in [
        ("nowhere.gguf", vec!["nowhere.gguf", "No such file"]),
        (DRAFTER, vec!["dflash", "--draft"]),
        (cut.path(), vec!["truncated"]),
        (text.path(), vec!["not a GGUF file"]),
    ] {
        for command in [&["run", "hi"][..], &["inspect"], &["logits", "--tokens", "1", "-o", "x.npy"]] {
            let error = muser(&[command, &["-m", file]].concat()).error(1);
            for word in &words {
                assert!(error.contains(word), "{command:?}: {error}");
            }
        }
    }
}

#[test]
fn a_drafter_that_does_not_fit_is_refused() {
    let error = muser(&["run", "hi", "-m", &tiny(), "--draft", DRAFTER]).error(1);
    assert!(error.contains("drafter"), "{error}");
    let error = muser(&["run", "hi", "--draft", &tiny()]).error(1);
    assert!(error.contains("muse-glimmer") && error.contains("-m"), "{error}");
}

#[test]
fn wrong_flags_end_with_code_2() {
    for args in [
        &["nothing"][..],
        &["run", "hi", "--threads", "-1"],
        &["run", "hi", "--threads", "0"],
        &["run", "hi", "--device", "tpu"],
        &["run", "hi", "--lane", "fast"],
        &["run", "hi", "--isa", "mmx"],
        &["run", "hi", "--logit-bias", "a=b"],
        &["run", "hi", "-n", "0"],
        &["logits", "-o", "x"],
        &["bench", "--quant", "q9_k", "--geometry", "muse-glimmer-30b"],
        &["bench", "--layers", "2"],
        &["--nothing"],
    ] {
        muser(args).error(2);
    }
}

#[test]
fn wrong_values_are_named() {
    for (args, word) in [
        (&["run", "hi", "--temp", "-1"][..], "temperature"),
        (&["run", "hi", "--top-p", "2"], "top_p"),
        (&["run", "hi", "--logit-bias", "9999=1"], "9999"),
        (&["run", "hi", "--kv", "f32"], "f16"),
        (&["run", "hi", "--context", "4"], "context"),
        (&["run", "--file", "nowhere.txt"], "nowhere.txt"),
        (&["run", "hi", "--tools", "nowhere.json"], "nowhere.json"),
        (&["logits", "--tokens", "1,-2", "-o", "x.npy"], "-2"),
        (&["logits", "--tokens", "6400", "-o", "x.npy"], "6399"),
        (&["logits", "--tokens", "", "-o", "x.npy"], "token"),
        (&["logits", "--tokens", "1", "-o", "/nowhere/x.npy"], "/nowhere/x.npy"),
        (&["kernels", "--pass", "draft", "--draft", "off"], "drafter"),
        (&["perplexity", "nowhere.txt"], "nowhere.txt"),
        (&["trace", "--rows", "1000"], "--chunk"),
        (&["run", "hi", "--device", "cpu", "--gpu-layers", "3"], "no GPU"),
        (&["run", "hi", "--device", "cpu", "-ngl", "3"], "--gpu-layers 3"),
        (&["verify", "--devices", "cpu,reference", "--gpu-layers", "3"], "leave it out"),
        (&["verify", "--devices", "cpu,cuda", "--gpu-layers", "0"], "leave it out"),
    ] {
        let error = muser(args).error(1);
        assert!(error.contains(word), "{args:?}: {error}");
    }
    let error = muser_with(b"one two", &["perplexity", "-"]).error(1);
    assert!(error.contains("--window"), "{error}");
}

#[test]
fn a_model_without_template_runs_raw_only() {
    // The tiny model without one key.
    let source = Gguf::open(tiny().as_ref()).unwrap();
    let mut header = GgufWriter::new();
    for (key, value) in source.metadata().filter(|(key, _)| *key != "tokenizer.chat_template") {
        header.set(key, value.clone()).unwrap();
    }
    for tensor in source.tensors() {
        header.tensor(&tensor.name, tensor.dtype, &tensor.dims).unwrap();
    }
    let mut data = header.start(vec![]).unwrap();
    for tensor in source.tensors() {
        data.write(&tensor.name, source.tensor(&tensor.name).unwrap().data).unwrap();
    }
    let file = Temp::with("no-template.gguf", data.finish().unwrap());
    let error = muser(&["run", "hi", "-m", file.path()]).error(1);
    assert!(error.contains("--raw"), "{error}");
    muser(&["run", "--raw", "hi", "-n", "2", "-m", file.path()]).ok();
    assert!(muser(&["inspect", "-m", file.path()]).ok().contains("no chat template"));
}
