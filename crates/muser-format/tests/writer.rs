//! The writer: what other tools wrote comes out again byte for byte, and misuse is refused.

mod common;

use std::path::{Path, PathBuf};

use muser_format::{DType, FormatError, Gguf, GgufWriter, Value};

fn fixture(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/")).join(path)
}

#[test]
fn files_of_llama_cpp_are_reproduced_byte_for_byte() {
    for path in ["gguf/tiny-mix.gguf", "gguf/tiny-Q4_K_M-scalar.gguf", "dflash/tiny-dflash-Q8_0.gguf"] {
        let gguf = Gguf::open(&fixture(path)).unwrap();
        let mut writer = GgufWriter::new();
        for (key, value) in gguf.metadata() {
            writer.set(key, value.clone()).unwrap();
        }
        for info in gguf.tensors() {
            writer.tensor(&info.name, info.dtype, &info.dims).unwrap();
        }
        let mut data = writer.start(Vec::new()).unwrap();
        for info in gguf.tensors() {
            data.write(&info.name, gguf.tensor(&info.name).unwrap().data).unwrap();
        }
        let written = data.finish().unwrap();
        assert!(written == std::fs::read(fixture(path)).unwrap(), "{path}");
    }
}

#[test]
fn every_value_type_survives() {
    let mut writer = GgufWriter::new();
    for (key, value) in common::one_of_each() {
        writer.set(&key, value).unwrap();
    }
    let gguf = Gguf::from_bytes(writer.start(Vec::new()).unwrap().finish().unwrap()).unwrap();
    let read: Vec<_> = gguf.metadata().map(|(key, value)| (key.to_string(), value.clone())).collect();
    assert_eq!(read, common::one_of_each());
    assert_eq!((gguf.version(), gguf.tensors().len()), (3, 0));
}

#[test]
fn an_own_alignment_moves_the_data() {
    let mut writer = GgufWriter::new();
    writer.set("general.alignment", Value::U32(4096)).unwrap();
    writer.tensor("a", DType::F32, &[1]).unwrap().tensor("b", DType::F32, &[1]).unwrap();
    let mut data = writer.start(Vec::new()).unwrap();
    data.write("a", &[1; 4]).unwrap().write("b", &[2; 4]).unwrap();
    let bytes = data.finish().unwrap();
    assert_eq!((&bytes[4096..4100], &bytes[8192..8196]), (&[1; 4][..], &[2; 4][..]));
    assert_eq!(Gguf::from_bytes(bytes).unwrap().tensor("b").unwrap().data, [2; 4]);
}

#[test]
fn misuse_is_refused_by_name() {
    fn refused<T>(result: Result<T, FormatError>, parts: &[&str]) {
        let message = result.err().unwrap().to_string();
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
    }
    let mut writer = GgufWriter::new();
    writer.set("k", Value::U8(1)).unwrap().tensor("a", DType::F32, &[1]).unwrap();
    writer.tensor("b", DType::F32, &[1]).unwrap();
    refused(writer.set("k", Value::U8(1)), &["\"k\"", "already"]);
    refused(writer.set("", Value::U8(1)), &["1 to 65535 bytes"]);
    refused(writer.set("general.alignment", Value::U32(24)), &["general.alignment", "power of two"]);
    refused(writer.tensor("a", DType::F32, &[1]), &["\"a\"", "already"]);
    refused(writer.tensor("c", DType::Q4K, &[128]), &["\"c\"", "128", "Q4_K"]);
    refused(writer.tensor("c", DType::F32, &[]), &["\"c\"", "0 dimensions"]);
    refused(writer.tensor("c", DType::F32, &[1; 5]), &["\"c\"", "5 dimensions"]);
    refused(writer.tensor("c", DType::F32, &[0]), &["\"c\"", "zero"]);

    let mut data = writer.start(Vec::new()).unwrap();
    refused(data.write("a", &[0; 8]), &["\"a\"", "4 bytes", "8"]);
    let mut writer = GgufWriter::new();
    writer.tensor("a", DType::F32, &[1]).unwrap();
    let mut data = writer.start(Vec::new()).unwrap();
    refused(data.write("b", &[0; 4]), &["\"b\"", "\"a\" is next"]);
    let mut writer = GgufWriter::new();
    writer.tensor("a", DType::F32, &[1]).unwrap();
    refused(writer.start(Vec::new()).unwrap().finish(), &["\"a\"", "not written"]);
}
