//! Split models: any part opens all, and a missing, renamed or foreign part is named.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};

use muser_format::{DType, Gguf, GgufWriter, Value};

/// A folder for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("muser-format-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn part_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("model-{number:05}-of-00003.gguf"))
}

/// Writes one part with one tensor; the first has the model's metadata.
fn write_part(path: &Path, number: u16, tensor: &str) {
    let mut writer = GgufWriter::new();
    writer.set("split.no", Value::U16(number - 1)).unwrap();
    writer.set("split.count", Value::U16(3)).unwrap();
    writer.set("split.tensors.count", Value::I32(3)).unwrap();
    if number == 1 {
        writer.set("general.architecture", Value::Str("muse-glimmer".into())).unwrap();
    }
    writer.tensor(tensor, DType::F32, &[2]).unwrap();
    let mut data = writer.start(std::fs::File::create(path).unwrap()).unwrap();
    data.write(tensor, &[number as u8; 8]).unwrap();
    data.finish().unwrap();
}

fn write_model(folder: &Path) {
    for (number, tensor) in [(1, "a"), (2, "b"), (3, "c")] {
        write_part(&part_path(folder, number), number as u16, tensor);
    }
}

#[test]
fn any_part_opens_the_model() {
    let folder = Folder::new("any");
    write_model(&folder.0);
    for number in 1..=3 {
        let path = part_path(&folder.0, number);
        let gguf = Gguf::open(&path).unwrap();
        assert_eq!(gguf.path(), path);
        assert_eq!(gguf.arch().unwrap(), "muse-glimmer");
        let names: Vec<&str> = gguf.tensors().iter().map(|info| info.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
            assert_eq!(gguf.tensor(name).unwrap().data, [byte; 8]);
        }
        let size: u64 = (1..=3).map(|n| std::fs::metadata(part_path(&folder.0, n)).unwrap().len()).sum();
        assert_eq!(gguf.file_bytes(), size);
    }
}

fn refused(path: &Path, parts: &[&str]) {
    let message = Gguf::open(path).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = Folder::new("missing");
    write_model(&folder.0);
    std::fs::remove_file(part_path(&folder.0, 2)).unwrap();
    refused(&part_path(&folder.0, 3), &["part 2 of 3", "model-00002-of-00003.gguf", "one folder"]);
}

#[test]
fn a_renamed_model_is_told_its_name() {
    let folder = Folder::new("renamed");
    write_model(&folder.0);
    let renamed = folder.0.join("mine.gguf");
    std::fs::rename(part_path(&folder.0, 1), &renamed).unwrap();
    refused(&renamed, &["mine.gguf", "NAME-00001-of-00003.gguf"]);
}

#[test]
fn parts_in_the_wrong_place_are_named() {
    let folder = Folder::new("swapped");
    write_model(&folder.0);
    std::fs::copy(part_path(&folder.0, 1), part_path(&folder.0, 2)).unwrap();
    refused(&part_path(&folder.0, 1), &["model-00002-of-00003.gguf", "part 2 of 3", "split.no = 0"]);
}

#[test]
fn a_tensor_in_two_parts_is_refused() {
    let folder = Folder::new("twice");
    write_model(&folder.0);
    write_part(&part_path(&folder.0, 3), 3, "a");
    refused(&part_path(&folder.0, 1), &["\"a\"", "two tensors"]);
}

#[test]
fn a_wrong_total_is_refused() {
    let folder = Folder::new("total");
    write_model(&folder.0);
    let path = part_path(&folder.0, 3);
    let mut writer = GgufWriter::new();
    writer.set("split.no", Value::U16(2)).unwrap().set("split.count", Value::U16(3)).unwrap();
    writer.start(std::fs::File::create(&path).unwrap()).unwrap().finish().unwrap();
    refused(&path, &["2 tensors", "split.tensors.count = 3"]);
}

#[test]
fn a_missing_file_and_a_folder_are_named() {
    let folder = Folder::new("absent");
    refused(&folder.0.join("none.gguf"), &["cannot open", "none.gguf"]);
    refused(&folder.0, &["cannot open", "directory"]);
    std::fs::write(folder.0.join("empty.gguf"), []).unwrap();
    refused(&folder.0.join("empty.gguf"), &["empty.gguf is not a GGUF file"]);
}
