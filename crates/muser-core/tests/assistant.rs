//! The drafter in Hugging Face's form: the fixtures' GGUF, which is lossless, written out under the checkpoint's names.
#![allow(clippy::unwrap_used)]

use muser_core::model::{find_drafter, open};
use muser_format::Gguf;
use muser_testkit::fixtures::fixture;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("muser-core-{}-assistant-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const TARGET: &str = "gguf/tiny-Q8_0.gguf";
const DRAFTER: &str = "dflash/tiny-dflash-Q8_0.gguf";

/// GGUF names and those of the checkpoint.
const NAMES: [(&str, &str); 14] = [
    ("fc.weight", "encoder.fc.weight"),
    ("enc.output_norm.weight", "encoder.output_norm_enc.weight"),
    ("attn_norm", "input_layernorm"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("blk.", "layers."),
];

fn renamed(name: &str) -> String {
    if name == "output_norm.weight" {
        return "norm.weight".into();
    }
    NAMES.iter().fold(name.to_string(), |name, (from, to)| name.replace(from, to))
}

/// The config of the fixtures' assistant.
fn config() -> Value {
    json!({
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "block_size": 8,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 256, "dtype": "bfloat16",
        "layer_types": ["sliding_attention", "sliding_attention"], "mask_token_id": 968,
        "max_position_embeddings": 131072, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "sliding_window": 32, "target_layer_ids": [1, 4, 6],
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    })
}

/// Writes the checkpoint's two files, with all tensors in f32 and `extra` ones of a value each.
fn write(folder: &Path, config: &Value, extra: &[&str]) {
    let gguf = Gguf::open(&fixture(DRAFTER)).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    let mut add = |name: &str, shape: Vec<usize>, values: &[f32]| {
        let start = data.len();
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        header.insert(
            name.into(),
            json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}),
        );
    };
    for info in gguf.tensors() {
        let tensor = gguf.tensor(&info.name).unwrap();
        let mut values = vec![0.0; tensor.rows() * tensor.cols()];
        muser_format::dequantize(info.dtype, tensor.data, &mut values).unwrap();
        let vector = info.name.ends_with("norm.weight");
        let shape = if vector { vec![tensor.cols()] } else { vec![tensor.rows(), tensor.cols()] };
        add(&renamed(&info.name), shape, &values);
    }
    extra.iter().for_each(|name| add(name, vec![1], &[0.0]));
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn error(config: &Value, extra: &[&str]) -> String {
    let folder = Folder::new();
    write(folder.path(), config, extra);
    open(&fixture(TARGET), Some(folder.path())).err().unwrap().to_string()
}

#[test]
fn both_forms_of_the_drafter_are_one_model() {
    let folder = Folder::new();
    write(folder.path(), &config(), &[]);
    let want = open(&fixture(TARGET), Some(&fixture(DRAFTER))).unwrap().0;
    for path in [folder.path().to_path_buf(), folder.path().join("model.safetensors")] {
        let got = open(&fixture(TARGET), Some(&path)).unwrap().0;
        let (a, b) = (got.plans.draft.as_ref().unwrap(), want.plans.draft.as_ref().unwrap());
        assert_eq!((&a.spec, &a.block.geometry), (&b.spec, &b.block.geometry));
        assert_eq!(got.slots.len(), want.slots.len());
        for slot in want.slots.keys() {
            let (x, y) = (got.tensor(*slot).unwrap(), want.tensor(*slot).unwrap());
            assert_eq!((x.rows, x.cols), (y.rows, y.cols), "{slot}");
            assert!(x.to_f32().unwrap() == y.to_f32().unwrap(), "{slot}");
        }
    }
}

#[test]
fn an_assistant_beside_the_target_is_found() {
    let folder = Folder::new();
    let target = folder.path().join("tiny-Q8_0.gguf");
    std::fs::copy(fixture(TARGET), &target).unwrap();
    assert_eq!(find_drafter(&target), None);
    let assistant = folder.path().join("tiny-assistant");
    std::fs::create_dir(&assistant).unwrap();
    write(&assistant, &config(), &[]);
    assert_eq!(find_drafter(&target), Some(assistant));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let cases = [
        ("hidden_size", json!(512), "is 512 wide, the target 256"),
        ("hidden_size", json!(0), "hidden_size: 0 is outside"),
        ("hidden_size", json!(-1), "is no drafter's config"),
        ("num_attention_heads", json!(u64::MAX), "num_attention_heads"),
        ("num_key_value_heads", json!(3), "num_key_value_heads"),
        ("head_dim", json!(127), "head_dim: 127 is odd"),
        ("block_size", json!(1), "block_size"),
        ("block_size", json!(65), "block_size"),
        ("mask_token_id", json!(1024), "mask_token_id: 1024 is outside the target's 1024 tokens"),
        ("target_layer_ids", json!([1, 8]), "names layer 8, the target has 8"),
        ("target_layer_ids", json!([4, 4]), "target_layer_ids"),
        ("target_layer_ids", json!([]), "target_layer_ids"),
        ("layer_types", json!(["sliding_attention"]), "layer_types: has 1 entries for 2 layers"),
        ("layer_types", json!(["linear", "linear"]), "\"linear\" is neither"),
        ("rms_norm_eps", json!(0.0), "rms_norm_eps"),
        ("rope_parameters", json!({"rope_theta": -1.0}), "rope_theta"),
        ("model_type", json!("qwen3"), "\"qwen3\""),
        ("intermediate_size", json!(512), "asks for 512 x 256"),
        ("num_hidden_layers", json!("two"), "is no drafter's config"),
    ];
    for (key, value, want) in cases {
        let mut config = config();
        config[key] = value;
        let got = error(&config, &[]);
        assert!(got.contains(want), "{key}: {got}");
    }
    let mut fewer = config();
    fewer.as_object_mut().unwrap().remove("mask_token_id");
    assert!(error(&fewer, &[]).contains("mask_token_id"));
    let more = json!({"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]});
    let mut three = config();
    more.as_object().unwrap().iter().for_each(|(k, v)| three[k] = v.clone());
    assert!(error(&three, &[]).contains("missing"), "{}", error(&three, &[]));
    for name in ["layers.0.attn_conv.base", "selector.hidden.weight", "markov_head.weight"] {
        assert!(error(&config(), &[name]).contains(&format!("has tensor {name}, which muser does not run")));
    }
}

#[test]
fn damaged_files_are_refused() {
    let folder = Folder::new();
    write(folder.path(), &config(), &[]);
    let weights = folder.path().join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    for length in [0, 7, 8, 500, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&weights, &whole[..length]).unwrap();
        let error = open(&fixture(TARGET), Some(folder.path())).err().unwrap().to_string();
        assert!(error.contains("download it again"), "{length} bytes: {error}");
    }
    std::fs::write(&weights, &whole).unwrap();
    let text = config().to_string();
    for length in [0, 1, text.len() / 2, text.len() - 1] {
        std::fs::write(folder.path().join("config.json"), &text[..length]).unwrap();
        let error = open(&fixture(TARGET), Some(folder.path())).err().unwrap().to_string();
        assert!(error.contains("config.json") && error.contains("download"), "{length} bytes: {error}");
    }
}
