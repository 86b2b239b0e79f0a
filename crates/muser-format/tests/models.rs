//! Real files written by llama.cpp's tools.

use std::path::PathBuf;

use muser_format::{Array, DType, FormatError, Gguf, Value, dequantize};

fn repo(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

/// Tensors of a model with `layers` layers: embedding, head, final norm, and 14 a layer.
const fn text_tensors(layers: usize) -> usize {
    3 + 14 * layers
}

#[test]
fn every_model_opens_and_decodes() {
    for (path, arch, tensors) in [
        ("tests/fixtures/gguf/tiny-Q8_0.gguf", "muse-glimmer", text_tensors(8)),
        ("tests/fixtures/gguf/tiny-Q4_K_M-scalar.gguf", "muse-glimmer", text_tensors(8)),
        ("tests/fixtures/gguf/tiny-mix.gguf", "muse-glimmer", text_tensors(8)),
        ("tests/fixtures/dflash/tiny-dflash-Q8_0.gguf", "dflash", 3 + 11 * 2),
        ("models/glimmer-mini-Q8_0.gguf", "muse-glimmer", text_tensors(16)),
        ("models/glimmer-mini-dflash-Q8_0.gguf", "dflash", 3 + 11 * 3),
    ] {
        let path = repo(path);
        let gguf = Gguf::open(&path).unwrap();
        assert_eq!(gguf.arch().unwrap(), arch);
        assert_eq!(gguf.tensors().len(), tensors, "{}", path.display());
        assert_eq!(gguf.path(), path);
        assert_eq!(gguf.file_bytes(), std::fs::metadata(&path).unwrap().len());
        for info in gguf.tensors() {
            let tensor = gguf.tensor(&info.name).unwrap();
            assert_eq!(tensor.data.len(), tensor.rows() * info.dtype.row_bytes(tensor.cols()).unwrap());
            let mut values = vec![f32::NAN; tensor.rows() * tensor.cols()];
            dequantize(info.dtype, tensor.data, &mut values).unwrap();
            assert!(values.iter().all(|value| value.abs() < 100.0), "{}", info.name);
        }
    }
}

#[test]
fn the_mix_holds_every_block_type() {
    let gguf = Gguf::open(&repo("tests/fixtures/gguf/tiny-mix.gguf")).unwrap();
    let types: std::collections::HashSet<DType> = gguf.tensors().iter().map(|info| info.dtype).collect();
    let missing: Vec<_> = DType::ALL.iter().filter(|dtype| !types.contains(dtype)).collect();
    assert_eq!(missing, [&DType::Nvfp4]);
}

/// Written by gguf-py: one block of each type, one key of each value type.
#[test]
fn every_type_in_a_file_of_gguf_py() {
    let gguf = Gguf::open(&repo("fuzz/corpus/gguf/every-type")).unwrap();
    assert_eq!(gguf.tensors().len(), DType::ALL.len());
    for &dtype in DType::ALL {
        let tensor = gguf.tensor(dtype.name()).unwrap();
        assert_eq!((tensor.info.dtype, tensor.rows()), (dtype, 1));
    }
    assert_eq!(gguf.get("k.int64"), Some(&Value::I64(-4)));
    assert_eq!(gguf.get("k.float64"), Some(&Value::F64(0.25)));
    assert_eq!(gguf.get("a.i32"), Some(&Value::Array(Array::I32(vec![1, -2]))));
    assert_eq!(gguf.get("a.str").unwrap().as_array().unwrap().as_strings().unwrap(), ["a", "bc", ""]);
}

#[test]
fn metadata_keep_their_types() {
    let bools = Gguf::open(&repo("tests/fixtures/gguf/tiny-Q8_0.gguf")).unwrap();
    let pattern = "muse-glimmer.attention.sliding_window_pattern";
    let layers = [true, true, true, false, true, true, true, false];
    assert_eq!(bools.get(pattern), Some(&Value::Array(Array::Bool(layers.to_vec()))));
    assert_eq!(bools.u32("muse-glimmer.block_count").unwrap(), 8);
    assert_eq!(bools.u64("muse-glimmer.attention.sliding_window").unwrap(), 32);
    assert_eq!(bools.f32("muse-glimmer.rope.freq_base").unwrap(), 500_000.0);
    assert_eq!(bools.get("tokenizer.ggml.tokens").unwrap().as_array().unwrap().len(), 1024);

    let period = Gguf::open(&repo("tests/fixtures/gguf/tiny-Q4_K_M-scalar.gguf")).unwrap();
    assert_eq!(period.get(pattern), Some(&Value::U32(4)));
}

#[test]
fn getters_name_key_and_types() {
    let gguf = Gguf::open(&repo("tests/fixtures/gguf/tiny-Q8_0.gguf")).unwrap();
    let missing = gguf.u32("muse-glimmer.missing").unwrap_err();
    assert!(matches!(missing, FormatError::MissingKey { .. }));
    let wrong = gguf.bool("general.architecture").unwrap_err().to_string();
    for part in ["tiny-Q8_0.gguf", "general.architecture", "a bool", "string"] {
        assert!(wrong.contains(part), "{wrong}");
    }
}
