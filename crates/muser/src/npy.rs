//! NumPy's file format, version 1.0, for rows of f32: what `logits` writes and `perplexity` reads.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"\x93NUMPY\x01\x00";

/// A file that is written row by row.
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    cols: usize,
    left: usize,
}

impl Writer {
    /// Creates a file of `rows` rows of `cols` values.
    pub fn create(path: &Path, rows: usize, cols: usize) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut file = BufWriter::new(file);
        let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
        // The data starts at a multiple of 64; the header ends with a line feed.
        let end = (MAGIC.len() + 2 + header.len() + 1).next_multiple_of(64);
        while header.len() + 1 < end - MAGIC.len() - 2 {
            header.push(' ');
        }
        header.push('\n');
        file.write_all(MAGIC)?;
        file.write_all(&(header.len() as u16).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        Ok(Writer { path: path.to_path_buf(), file, cols, left: rows })
    }

    /// Writes the next row.
    pub fn row(&mut self, values: &[f32]) -> Result<()> {
        if values.len() != self.cols || self.left == 0 {
            bail!("{}: a row of {} values does not fit", self.path.display(), values.len());
        }
        self.left -= 1;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.file.write_all(&bytes).with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Ends the file.
    pub fn finish(mut self) -> Result<()> {
        self.file.flush().with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// A file that is read row by row.
pub struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    /// Rows of the file.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
}

impl Reader {
    /// Opens a file of little-endian f32 in C order with two dimensions.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let size = file.metadata().with_context(|| format!("cannot read {}", path.display()))?.len();
        let mut file = BufReader::new(file);
        let bad = |why: &str| {
            format!(
                "{}: {why}; muser reads NumPy files of f32 with two dimensions, as `muser logits` writes them",
                path.display()
            )
        };
        let mut start = [0; 10];
        file.read_exact(&mut start).with_context(|| bad("is too short"))?;
        if start[..6] != MAGIC[..6] {
            bail!(bad("is not a NumPy file"));
        }
        let mut length = u16::from_le_bytes([start[8], start[9]]) as usize;
        let mut before = 10;
        if start[6] > 1 {
            let mut more = [0; 2];
            file.read_exact(&mut more).with_context(|| bad("is too short"))?;
            length |= (u16::from_le_bytes(more) as usize) << 16;
            before = 12;
        }
        let mut header = vec![0; length.min(1 << 16)];
        file.read_exact(&mut header).with_context(|| bad("is too short"))?;
        let header = String::from_utf8_lossy(&header);
        let (rows, cols) =
            shape(&header).with_context(|| bad(&format!("has the header {:?}", header.trim())))?;
        let data = (rows as u64).checked_mul(cols as u64).and_then(|n| n.checked_mul(4));
        if data.and_then(|n| n.checked_add((before + length) as u64)) != Some(size) {
            bail!(bad(&format!("promises {rows} x {cols} values but has {size} bytes")));
        }
        Ok(Reader { path: path.to_path_buf(), file, rows, cols })
    }

    /// The next row.
    pub fn row(&mut self) -> Result<Vec<f32>> {
        let mut bytes = vec![0; self.cols * 4];
        self.file.read_exact(&mut bytes).with_context(|| format!("cannot read {}", self.path.display()))?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

/// Rows and columns out of a header that states little-endian f32 in C order.
fn shape(header: &str) -> Option<(usize, usize)> {
    let value = |key: &str| Some(header.split_once(key)?.1.split_once(':')?.1.trim_start());
    let plain = value("'descr'")?.starts_with("'<f4'") && value("'fortran_order'")?.starts_with("False");
    let inner = value("'shape'")?.strip_prefix('(')?.split_once(')')?.0;
    let mut numbers = inner.split(',').map(|n| n.trim().parse::<usize>());
    let both = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    (plain && numbers.all(|n| n.is_err())).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let path = std::env::temp_dir().join(format!("muser-npy-{}", std::process::id()));
        let mut writer = Writer::create(&path, 2, 3).unwrap();
        writer.row(&[1.0, -2.5, f32::MIN_POSITIVE]).unwrap();
        assert!(writer.row(&[1.0]).is_err());
        writer.row(&[0.0; 3]).unwrap();
        assert!(writer.row(&[0.0; 3]).is_err());
        writer.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 128 + 24);
        assert_eq!(bytes[127], b'\n');
        let mut reader = Reader::open(&path).unwrap();
        assert_eq!((reader.rows, reader.cols), (2, 3));
        assert_eq!(reader.row().unwrap(), [1.0, -2.5, f32::MIN_POSITIVE]);
        std::fs::write(&path, &bytes[..130]).unwrap();
        assert!(Reader::open(&path).is_err());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn headers_of_other_kinds_are_refused() {
        let header = |descr: &str, order: &str, shape: &str| {
            format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}")
        };
        assert_eq!(shape(&header("<f4", "False", "(300, 1024)")), Some((300, 1024)));
        assert_eq!(shape(&header("<f8", "False", "(300, 1024)")), None);
        assert_eq!(shape(&header("<f4", "True", "(300, 1024)")), None);
        assert_eq!(shape(&header("<f4", "False", "(300,)")), None);
        assert_eq!(shape(&header("<f4", "False", "(300, 10, 24)")), None);
        assert_eq!(shape(&header("<f4", "False", "(-1, 10)")), None);
    }
}
