//! Reading tests/fixtures.

use muser_core::Model;
use std::path::PathBuf;
use std::sync::Arc;

/// A file of tests/fixtures: of the repository in whose root a program runs, else of the one that it was built in.
pub fn fixture(name: &str) -> PathBuf {
    let here = PathBuf::from("tests/fixtures").join(name);
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name);
    if here.exists() { here } else { built }
}

/// A model shipped in models/.
pub fn shipped(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models")).join(name)
}

/// A fixture model, with a drafter where one is named.
pub fn model(target: &str, drafter: Option<&str>) -> Arc<Model> {
    let drafter = drafter.map(fixture);
    Arc::new(muser_core::model::open(&fixture(target), drafter.as_deref()).unwrap().0)
}

/// glimmer-mini with its drafter.
pub fn mini() -> Arc<Model> {
    let drafter = shipped("glimmer-mini-dflash-Q8_0.gguf");
    Arc::new(muser_core::model::open(&shipped("glimmer-mini-Q8_0.gguf"), Some(&drafter)).unwrap().0)
}

/// The same without its drafter.
pub fn mini_alone() -> Arc<Model> {
    Arc::new(muser_core::model::open(&shipped("glimmer-mini-Q8_0.gguf"), None).unwrap().0)
}

/// Named arrays of a safetensors file.
pub struct Arrays(Vec<u8>);

impl Arrays {
    pub fn open(name: &str) -> Self {
        Arrays(std::fs::read(fixture(name)).unwrap())
    }

    /// One array as f32 (F32 or F16 on disk), row-major.
    pub fn get(&self, name: &str) -> Vec<f32> {
        let file = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        let t = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        match t.dtype() {
            safetensors::Dtype::F32 => {
                t.data().chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
            }
            safetensors::Dtype::F16 => t
                .data()
                .chunks_exact(2)
                .map(|c| half::f16::from_le_bytes(c.try_into().unwrap()).to_f32())
                .collect(),
            other => panic!("{name} is {other:?}"),
        }
    }
}

/// A JSON fixture.
pub fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

/// Token ids of a JSON array.
pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// The prompts p24, p100 and p300.
pub fn prompts() -> [(&'static str, Vec<u32>); 3] {
    let all = json("goldens/prompts.json");
    ["p24", "p100", "p300"].map(|name| (name, ids(&all[name])))
}
