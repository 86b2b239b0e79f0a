//! safetensors files: those of the goldens, indexes, and damage.

use std::path::{Path, PathBuf};

use muser_format::{SafeDtype, Safetensors};
use proptest::prelude::*;

fn fixture(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/")).join(path)
}

/// The greatest golden logit of the last position is the golden's first greedy token.
#[test]
fn golden_logits_are_read() {
    let logits = Safetensors::open(&fixture("goldens/hf-logits.safetensors")).unwrap();
    assert_eq!(logits.names().collect::<Vec<_>>(), ["p100", "p24", "p300"]);
    let greedy = std::fs::read_to_string(fixture("goldens/greedy.json")).unwrap();
    let greedy: serde_json::Value = serde_json::from_str(&greedy).unwrap();
    for (name, rows) in [("p24", 24), ("p100", 100), ("p300", 200)] {
        let tensor = logits.tensor(name).unwrap();
        assert_eq!((tensor.dtype, tensor.shape), (SafeDtype::F32, &[rows, 1024][..]));
        let values = tensor.to_f32().unwrap();
        let last = &values[values.len() - 1024..];
        let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        assert_eq!(greedy["hf-f32"][name][0].as_u64(), Some(best as u64), "{name}");
    }
    assert!(logits.tensor("p1").is_none());
}

/// A file with an F16 tensor `h` = [1, -2], a BF16 tensor `b` = [0.5] and a U8 tensor `u`.
fn small() -> Vec<u8> {
    let header = br#"{"h":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[1,1],"data_offsets":[4,6]},"u":{"dtype":"U8","shape":[],"data_offsets":[6,7]}}"#;
    let data = [0x00, 0x3c, 0x00, 0xc0, 0x00, 0x3f, 9];
    [&(header.len() as u64).to_le_bytes()[..], header, &data].concat()
}

#[test]
fn half_types_widen_and_bytes_do_not() {
    let file = Safetensors::from_bytes(small()).unwrap();
    assert_eq!(file.tensor("h").unwrap().to_f32().unwrap(), [1.0, -2.0]);
    assert_eq!(file.tensor("b").unwrap().to_f32().unwrap(), [0.5]);
    let bytes = file.tensor("u").unwrap();
    assert_eq!((bytes.shape, bytes.data, bytes.to_f32()), (&[][..], &[9][..], None));
}

#[test]
fn an_index_joins_files() {
    let folder = std::env::temp_dir().join(format!("muser-format-{}-index", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("one.safetensors"), small()).unwrap();
    let index = folder.join("model.safetensors.index.json");
    let map = |map: &str| std::fs::write(&index, format!("{{\"weight_map\":{{{map}}}}}")).unwrap();
    let refused = |part: &str| {
        let message = Safetensors::open(&folder).err().unwrap().to_string();
        assert!(message.contains(part), "{part:?} is not in: {message}");
    };

    map(r#""h":"one.safetensors""#);
    let joined = Safetensors::open(&folder).unwrap();
    assert_eq!(joined.names().collect::<Vec<_>>(), ["h"]);
    assert_eq!(joined.tensor("h").unwrap().data.len(), 4);
    assert_eq!(Safetensors::open(&index).unwrap().names().count(), 1);

    map(r#""h":"one.safetensors","x":"one.safetensors""#);
    refused("one.safetensors holds \"x\"");
    map(r#""h":"two.safetensors""#);
    refused("two.safetensors");
    map(r#""h":"../one.safetensors""#);
    refused("same folder");
    std::fs::write(&index, "{}").unwrap();
    refused("weight_map");
    std::fs::remove_file(&index).unwrap();
    refused("model.safetensors");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn truncation_is_named() {
    let bytes = small();
    for length in 0..bytes.len() {
        let message = Safetensors::from_bytes(bytes[..length].to_vec()).err().unwrap().to_string();
        assert!(message.contains("download it again"), "{length}: {message}");
    }
}

/// Sizes near 2^64 that add up to an overflow must not pass for a small file.
#[test]
fn overflowing_sizes_are_refused() {
    let half = u64::MAX / 2 + 1;
    let header = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{}],"data_offsets":[0,{}]}},"b":{{"dtype":"U8","shape":[{half}],"data_offsets":[{},{}]}}}}"#,
        half - 1,
        half - 1,
        half - 1,
        u64::MAX
    );
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    assert!(Safetensors::from_bytes(bytes).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_bytes_are_refused_or_read(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = small();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(file) = Safetensors::from_bytes(bytes) {
            for name in file.names() {
                let _ = file.tensor(name).expect("listed").to_f32();
            }
        }
    }
}
