//! Any bytes as a GGUF file: opened, every key looked up, every tensor decoded.

#![no_main]

use libfuzzer_sys::fuzz_target;
use muser_format::{Gguf, dequantize};

/// Values decoded of one input at most: a ternary file of a few KB stays quick.
const MAX_VALUES: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes(bytes.to_vec()) else { return };
    assert_eq!(gguf.file_bytes(), bytes.len() as u64);
    for (key, value) in gguf.metadata() {
        let found = gguf.get(key).expect("a listed key is found");
        assert_eq!(found.type_name(), value.type_name());
        let _ = (gguf.u32(key), gguf.u64(key), gguf.f32(key), gguf.bool(key), gguf.str(key));
    }
    let mut left = MAX_VALUES;
    for info in gguf.tensors() {
        let tensor = gguf.tensor(&info.name).expect("a listed tensor is found");
        let values = tensor.rows() * tensor.cols();
        assert_eq!(
            tensor.data.len(),
            tensor.rows() * info.dtype.row_bytes(tensor.cols()).expect("whole blocks")
        );
        if values > left {
            return;
        }
        left -= values;
        dequantize(info.dtype, tensor.data, &mut vec![0.0; values]).expect("lengths were checked");
    }
});
