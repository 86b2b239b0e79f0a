//! How Python writes numbers and JSON, for templates that were written for jinja2.

use serde_json::ser::Formatter;
use std::io::{Result, Write};

/// `repr` of a float: the shortest digits that read back the same, an exponent below 1e-4 and from 1e16 on.
pub(crate) fn float(x: f64) -> String {
    if !x.is_finite() {
        return x.to_string();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(e) if x != 0.0 && !(-4..16).contains(&e) => {
            let sign = if e < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", e.abs())
        }
        _ => format!("{x:?}"),
    }
}

/// `json.dumps`: `", "` between items (a line each with `indent`), `": "` after keys, floats as `repr` writes them.
#[derive(Default)]
pub(crate) struct Json {
    indent: Option<usize>,
    level: usize,
    /// The innermost open container has an item.
    filled: bool,
}

impl Json {
    /// With items on lines of their own, indented by `indent` spaces a level.
    pub(crate) fn indented(indent: Option<usize>) -> Self {
        Json { indent, ..Json::default() }
    }

    fn open<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> Result<()> {
        self.level += 1;
        self.filled = false;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> Result<()> {
        self.level -= 1;
        if self.filled {
            self.line(out)?;
        }
        out.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        match (first, self.indent) {
            (true, _) => {}
            (false, None) => out.write_all(b", ")?,
            (false, Some(_)) => out.write_all(b",")?,
        }
        self.line(out)
    }

    fn line<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        match self.indent {
            None => Ok(()),
            Some(width) => write!(out, "\n{:1$}", "", width * self.level),
        }
    }
}

impl Formatter for Json {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        self.item(out, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        self.item(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        out.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> Result<()> {
        self.filled = true;
        Ok(())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> Result<()> {
        out.write_all(float(value).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn floats_are_pythons() {
        // repr() of CPython 3.
        for (x, want) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (1.5, "1.5"),
            (-3.25, "-3.25"),
            (0.1, "0.1"),
            (100.0, "100.0"),
            (123456.789, "123456.789"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (0.000012345, "1.2345e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.2345678901234568e29, "1.2345678901234568e+29"),
            (9007199254740993.0, "9007199254740992.0"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
        ] {
            assert_eq!(super::float(x), want);
        }
    }
}
