//! Models in several files, `NAME-00001-of-0000N.gguf`: the names of the parts, and what each must say of itself.

use std::path::{Path, PathBuf};

use super::metadata::Metadata;
use crate::FormatError;

const COUNT_KEY: &str = "split.count";
const NUMBER_KEY: &str = "split.no";
const TENSORS_KEY: &str = "split.tensors.count";

/// Number of parts that a file's metadata state; 1 where they state none.
pub(super) fn part_count(metadata: &Metadata) -> Result<u64, FormatError> {
    match metadata.get(COUNT_KEY) {
        Some(_) => Ok(metadata.u64(COUNT_KEY)?.max(1)),
        None => Ok(1),
    }
}

/// Checks that `metadata` are those of part `number` (from 1) of `count`.
pub(super) fn check_part(
    metadata: &Metadata,
    path: &Path,
    number: u64,
    count: u64,
) -> Result<(), FormatError> {
    let (stated, stated_count) = (metadata.u64(NUMBER_KEY)?, metadata.u64(COUNT_KEY)?);
    if stated.checked_add(1) == Some(number) && stated_count == count {
        return Ok(());
    }
    Err(refused(
        path,
        format!(
            "expected part {number} of {count} of a split model, but {NUMBER_KEY} = {stated} (counted from 0) and \
             {COUNT_KEY} = {stated_count}: the part was renamed or belongs to another model; download it again"
        ),
    ))
}

/// Checks the number of tensors that the first part states for all parts.
pub(super) fn check_tensors(metadata: &Metadata, path: &Path, found: usize) -> Result<(), FormatError> {
    if metadata.get(TENSORS_KEY).is_none() || metadata.u64(TENSORS_KEY)? == found as u64 {
        return Ok(());
    }
    let stated = metadata.u64(TENSORS_KEY)?;
    Err(refused(
        path,
        format!(
            "the parts hold {found} tensors, but {TENSORS_KEY} = {stated}: download all parts of one model again"
        ),
    ))
}

/// The paths of all parts, from the path of one of them.
pub(super) fn part_paths(path: &Path, count: u64) -> Result<Vec<PathBuf>, FormatError> {
    let named = path.file_name().and_then(|name| name.to_str()).and_then(parse_name);
    match named {
        Some((prefix, named_count)) if named_count == count => {
            Ok((1..=count).map(|number| path.with_file_name(part_name(prefix, number, count))).collect())
        }
        _ => Err(refused(
            path,
            format!(
                "{COUNT_KEY} = {count}, so the file should be called NAME-00001-of-{count:05}.gguf or so, with all \
                 parts in one folder: give it back its name"
            ),
        )),
    }
}

/// The refusal of a part that isn't there.
pub(super) fn missing(path: &Path, part: &Path, number: usize, count: usize) -> FormatError {
    refused(
        path,
        format!("part {number} of {count}, {}, is missing: put all parts into one folder", part.display()),
    )
}

fn refused(path: &Path, problem: String) -> FormatError {
    FormatError::Split { file: path.display().to_string(), problem }
}

/// The name of part `number`, from 1.
fn part_name(prefix: &str, number: u64, count: u64) -> String {
    format!("{prefix}-{number:05}-of-{count:05}.gguf")
}

/// Prefix and count of a part's name.
fn parse_name(name: &str) -> Option<(&str, u64)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let five_digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !five_digits(number) || !five_digits(count) {
        return None;
    }
    Some((prefix, count.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        assert_eq!(parse_name("a-of-b-00002-of-00003.gguf"), Some(("a-of-b", 3)));
        assert_eq!(part_name("a-of-b", 2, 3), "a-of-b-00002-of-00003.gguf");
        for other in ["a.gguf", "a-00001-of-3.gguf", "a-00001-of-00003", "a-0000x-of-00003.gguf", "-of-.gguf"]
        {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}
