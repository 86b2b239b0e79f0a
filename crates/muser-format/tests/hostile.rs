//! Damaged and hostile files: each gets an error that names the place, none a panic or a large allocation.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{Raw, raw_str};
use muser_format::{DType, FormatError, Gguf, GgufWriter, Value, dequantize};
use proptest::prelude::*;

/// Bytes of one metadata key: name, type number, value.
fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&raw_str(name)[..], &kind.to_le_bytes(), value].concat()
}

/// Bytes of one row of the tensor table.
fn row(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let dims = dims.iter().flat_map(|dim| dim.to_le_bytes());
    let count = u32::try_from(dims.clone().count() / 8).unwrap();
    let mut row = raw_str(name);
    row.extend(count.to_le_bytes());
    row.extend(dims);
    row.extend(kind.to_le_bytes());
    row.extend(offset.to_le_bytes());
    row
}

fn array(kind: u32, count: u64, items: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &count.to_le_bytes(), items].concat()
}

fn refused(bytes: Vec<u8>) -> String {
    Gguf::from_bytes(bytes).expect_err("the file is unsound").to_string()
}

/// Each case: a file, and what the message must say.
#[test]
fn messages_name_the_place_and_the_mend() {
    const F32: u32 = 0;
    const U32: u32 = 4;
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    let one = |row: Vec<u8>| Raw { tensors: vec![row], data: vec![0; 64], ..Raw::default() }.bytes();
    let meta = |key: Vec<u8>| Raw { keys: vec![key], ..Raw::default() }.bytes();
    let two =
        |a: Vec<u8>, b: Vec<u8>| Raw { tensors: vec![a, b], data: vec![0; 128], ..Raw::default() }.bytes();
    let cases: Vec<(&str, Vec<u8>, &[&str])> = vec![
        ("empty", vec![], &["not a GGUF file"]),
        ("a zip", b"PK\x03\x04....".to_vec(), &["not a GGUF file", r"PK\x03\x04", ".gguf"]),
        ("version 1", Raw { version: 1, ..Raw::default() }.bytes(), &["version 1", "convert"]),
        ("version 4", Raw { version: 4, ..Raw::default() }.bytes(), &["version 4"]),
        ("big-endian", Raw { version: 3 << 24, ..Raw::default() }.bytes(), &["big-endian"]),
        (
            "more keys than bytes",
            Raw { key_count: Some(u64::MAX), ..Raw::default() }.bytes(),
            &["metadata", "truncated", "offset 16"],
        ),
        (
            "more tensors than bytes",
            Raw { tensor_count: Some(1 << 40), ..Raw::default() }.bytes(),
            &["tensor table", "truncated", "offset 8"],
        ),
        ("long key name", meta(key("k", U32, &[])[..4].to_vec()), &["truncated"]),
        ("empty key name", meta(key("", U32, &[0; 4])), &["key 1 of 1", "0 bytes at offset 24"]),
        (
            "key name not UTF-8",
            meta([&1u64.to_le_bytes()[..], &[0xff; 9]].concat()),
            &["key 1", "UTF-8 at offset 32"],
        ),
        ("unknown value type", meta(key("k", 13, &[0; 8])), &["\"k\"", "value type 13 at offset 33"]),
        ("bool of 2", meta(key("k", 7, &[2])), &["\"k\"", "not 2"]),
        (
            "text not UTF-8",
            meta(key("k", STRING, &[&3u64.to_le_bytes()[..], b"ab\x80"].concat())),
            &["\"k\"", "UTF-8 at offset 47"],
        ),
        (
            "token not UTF-8",
            meta(key(
                "t",
                ARRAY,
                &array(STRING, 2, &[raw_str("a"), [&1u64.to_le_bytes()[..], b"\xff"].concat()].concat()),
            )),
            &["string 1 of metadata key \"t\"", "UTF-8"],
        ),
        (
            "hostile array",
            meta(key("k", ARRAY, &array(U32, 1 << 62, &[0; 4]))),
            &["\"k\"", "4611686018427387904", "truncated"],
        ),
        ("hostile strings", meta(key("k", ARRAY, &array(STRING, 1 << 60, &[0; 8]))), &["\"k\"", "truncated"]),
        ("nested array", meta(key("k", ARRAY, &array(ARRAY, 1, &[0; 16]))), &["\"k\"", "array of arrays"]),
        (
            "alignment 0",
            meta(key("general.alignment", U32, &0u32.to_le_bytes())),
            &["general.alignment", "power of two", "0 (u32)"],
        ),
        (
            "alignment 48",
            meta(key("general.alignment", U32, &48u32.to_le_bytes())),
            &["general.alignment", "48 (u32)"],
        ),
        (
            "key twice",
            Raw { keys: vec![key("k", U32, &[0; 4]), key("k", U32, &[1; 4])], ..Raw::default() }.bytes(),
            &["\"k\"", "twice"],
        ),
        ("no dimensions", one(row("w", &[], F32, 0)), &["\"w\"", "0 dimensions"]),
        ("five dimensions", one(row("w", &[1; 5], F32, 0)), &["\"w\"", "5 dimensions"]),
        ("a dimension of zero", one(row("w", &[4, 0], F32, 0)), &["\"w\"", "[4, 0]", "zero"]),
        ("unknown tensor type", one(row("w", &[4], 5, 0)), &["\"w\"", "type 5"]),
        ("half a block", one(row("w", &[48], 8, 0)), &["\"w\"", "48", "Q8_0", "32"]),
        ("columns overflow", one(row("w", &[1 << 62], F32, 0)), &["\"w\"", "too large"]),
        ("rows overflow", one(row("w", &[1 << 32, 1 << 32], F32, 0)), &["\"w\"", "too large"]),
        ("values overflow", one(row("w", &[1 << 20, 1 << 44], 16, 0)), &["\"w\"", "too large"]),
        ("offset beyond", one(row("w", &[4], F32, 1 << 63)), &["\"w\"", "16 bytes", "truncated", "download"]),
        ("offset overflow", one(row("w", &[4], F32, u64::MAX - 31)), &["\"w\"", "truncated"]),
        (
            "data beyond",
            one(row("w", &[17], F32, 0)),
            &["\"w\"", "68 bytes at offset 64", "128 bytes", "truncated"],
        ),
        ("misaligned", one(row("w", &[4], F32, 16)), &["\"w\"", "offset 16", "multiple of 32"]),
        ("tensor twice", two(row("w", &[4], F32, 0), row("w", &[4], F32, 32)), &["\"w\"", "two tensors"]),
        ("overlap", two(row("v", &[4], F32, 32), row("w", &[9], F32, 0)), &["\"v\"", "\"w\"", "overlaps"]),
        (
            "a part alone",
            meta(key("split.count", 2, &3u16.to_le_bytes())),
            &["one of 3 parts", "by its path"],
        ),
        (
            "split.count of another type",
            meta(key("split.count", STRING, &raw_str("3"))),
            &["split.count", "string"],
        ),
    ];
    for (name, bytes, parts) in cases {
        let message = refused(bytes);
        for part in parts {
            assert!(message.contains(part), "{name}: {part:?} is not in: {message}");
        }
    }
}

#[test]
fn version_2_and_an_own_alignment_are_read() {
    let bytes = Raw {
        version: 2,
        keys: vec![key("general.alignment", 4, &64u32.to_le_bytes())],
        tensors: vec![row("w", &[2], 0, 64)],
        data: [&[0; 64][..], &1.5f32.to_le_bytes(), &(-2.0f32).to_le_bytes()].concat(),
        ..Raw::default()
    };
    let gguf = Gguf::from_bytes(bytes.bytes()).unwrap();
    assert_eq!(gguf.version(), 2);
    let mut values = [0.0; 2];
    dequantize(DType::F32, gguf.tensor("w").unwrap().data, &mut values).unwrap();
    assert_eq!(values, [1.5, -2.0]);
}

/// A sound file with every kind of value and some tensors.
fn small() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    for (key, value) in common::one_of_each() {
        writer.set(&key, value).unwrap();
    }
    writer.set("general.architecture", Value::Str("muse-glimmer".into())).unwrap();
    writer.tensor("a", DType::F32, &[3]).unwrap().tensor("b", DType::Q8_0, &[32, 2]).unwrap();
    let mut data = writer.start(Vec::new()).unwrap();
    data.write("a", &[1; 12]).unwrap().write("b", &[2; 68]).unwrap();
    data.finish().unwrap()
}

/// Opens and, where that works, touches everything.
fn walk(bytes: Vec<u8>) -> Result<(), FormatError> {
    let gguf = Gguf::from_bytes(bytes)?;
    for (key, value) in gguf.metadata() {
        assert_eq!(gguf.get(key).map(Value::type_name), Some(value.type_name()));
    }
    for info in gguf.tensors() {
        let tensor = gguf.tensor(&info.name).expect("listed");
        let mut values = vec![0.0; tensor.rows() * tensor.cols()];
        dequantize(info.dtype, tensor.data, &mut values)?;
    }
    Ok(())
}

#[test]
fn every_truncation_is_refused() {
    let bytes = small();
    walk(bytes.clone()).unwrap();
    // The last tensor's padding may be missing: nothing is read from it.
    let end = bytes.len() - bytes.len() % 32 - (96 - 68);
    for length in 0..end {
        let message = refused(bytes[..length].to_vec());
        assert!(length < 4 || message.contains("truncated"), "{length}: {message}");
    }
    for length in end..bytes.len() {
        walk(bytes[..length].to_vec()).unwrap();
    }
}

#[test]
fn every_changed_byte_is_refused_or_read() {
    let bytes = small();
    for at in 0..bytes.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] ^= change;
            // Either is right; what counts is that neither panics nor takes memory without bound.
            let _ = walk(changed);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn many_changes_are_refused_or_read(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        length in any::<prop::sample::Index>(),
    ) {
        let mut bytes = small();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - length.index(8));
        let _ = walk(bytes);
    }

    #[test]
    fn noise_behind_a_good_start_is_refused_or_read(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let start = [&b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0"[..], &noise].concat();
        let _ = walk(start);
    }
}
