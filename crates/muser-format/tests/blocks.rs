//! Every block codec against the values that ggml's C code and gguf-py computed for random blocks.

use muser_format::{DType, FormatError, Safetensors, dequantize};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/quant-blocks/");

#[test]
fn every_type_decodes_to_ggmls_bits() {
    let index = std::fs::read_to_string(format!("{FIXTURE}index.json")).unwrap();
    let index: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&index).unwrap();
    let blocks = Safetensors::open(format!("{FIXTURE}blocks.safetensors").as_ref()).unwrap();
    let mut differences = Vec::new();
    for (name, entry) in &index {
        let number = |key: &str| entry[key].as_u64().unwrap();
        let dtype = DType::from_name(name).unwrap();
        assert_eq!(u64::from(dtype.ggml_id()), number("ggml_type"), "{name}");
        let values = number("values_per_row") as usize;
        assert_eq!(dtype.row_bytes(values), Some(number("bytes_per_row") as usize), "{name}");

        let expected = blocks.tensor(&format!("{name}.f32")).unwrap().to_f32().unwrap();
        assert_eq!(expected.len() as u64, number("blocks") * number("values_per_row"), "{name}");
        let mut decoded = vec![f32::NAN; expected.len()];
        dequantize(dtype, blocks.tensor(&format!("{name}.blocks")).unwrap().data, &mut decoded).unwrap();
        // Minus zero is a different bit pattern and must come out as such too.
        let wrong = decoded.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        if wrong > 0 {
            differences.push(format!("{name}: {wrong} of {}", expected.len()));
        }
    }
    assert_eq!(differences, [""; 0]);
    // F32 alone needs no fixture: its bytes are the value.
    assert_eq!(index.len() + 1, DType::ALL.len());
}

#[test]
fn the_table_of_types_is_consistent() {
    for &dtype in DType::ALL {
        assert_eq!(DType::from_ggml(dtype.ggml_id()), Some(dtype));
        assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        assert_eq!(DType::from_name(&dtype.name().to_lowercase()), Some(dtype));
        assert_eq!(dtype.row_bytes(3 * dtype.block_len()), Some(3 * dtype.block_bytes()));
        assert_eq!(
            dtype.row_bytes(usize::MAX / dtype.block_len() * dtype.block_len()).is_some(),
            dtype.block_bytes() <= dtype.block_len()
        );
        if dtype.block_len() > 1 {
            assert_eq!(dtype.row_bytes(dtype.block_len() + 1), None);
        }
    }
}

#[test]
fn part_blocks_and_wrong_outputs_are_refused() {
    for &dtype in DType::ALL {
        let blocks = vec![0; 2 * dtype.block_bytes()];
        let mut out = vec![0.0; 2 * dtype.block_len()];
        dequantize(dtype, &blocks, &mut out).unwrap();
        for (bytes, values) in [(blocks.len() - 1, out.len()), (blocks.len(), out.len() - 1), (0, out.len())]
        {
            let refused = dequantize(dtype, &blocks[..bytes], &mut out[..values]);
            assert!(matches!(refused, Err(FormatError::BlockLength { .. })), "{dtype:?} {bytes} {values}");
        }
        dequantize(dtype, &[], &mut []).unwrap();
    }
}
