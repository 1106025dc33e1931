//! The parts of Python's standard library that chat templates use: `json.dumps` and `strftime`.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Value;
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::limits;

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
pub(super) fn json_dumps(value: &Value, indent: Option<usize>) -> Result<String, Error> {
    let mut out = Limited(Vec::new());
    let written = match indent {
        Some(n) => {
            let spaces = " ".repeat(n.min(64));
            let indented = Indented(PrettyFormatter::with_indent(spaces.as_bytes()));
            value.serialize(&mut Serializer::with_formatter(&mut out, indented))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine)),
    };
    let failed = |e: String| Error::new(ErrorKind::BadSerialization, format!("tojson: {e}"));
    written.map_err(|e| failed(e.to_string()))?;
    String::from_utf8(out.0).map_err(|e| failed(e.to_string()))
}

/// Text that may become as long as a template's values may. Indentation can make it far longer than the value.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.0.len() + bytes.len()) as u64 > limits::BYTES {
            return Err(io::Error::other(limits::too_long().to_string()));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// JSON on one line with Python's separators, `", "` and `": "`; serde_json's compact form has no spaces.
struct OneLine;

/// A number as Python's `repr` writes it: the fewest digits that identify it, with an exponent below -4 and from 16 on.
fn repr(number: f64) -> String {
    let shortest = format!("{number:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    match exponent.parse().unwrap_or(0) {
        exponent @ -4..16 => {
            let whole = if exponent >= 0 && number.fract() == 0.0 { ".0" } else { "" };
            format!("{number}{whole}")
        }
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, i32::abs(exponent)),
    }
}

impl Formatter for OneLine {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(repr(value).as_bytes())
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The time now, in UTC, in a `strftime` format.
pub(super) fn strftime_now(format: &str) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    strftime(format, seconds)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats the time that is `seconds` after the beginning of 1970, in UTC. A directive that is not known stays as
/// written.
fn strftime(format: &str, seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (weekday, month_name) = (DAYS[(days + 4) as usize % 7], MONTHS[month as usize - 1]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out += &year.to_string(),
            Some('y') => out += &format!("{:02}", year % 100),
            Some('m') => out += &format!("{month:02}"),
            Some('d') => out += &format!("{day:02}"),
            Some('H') => out += &format!("{:02}", second / 3600),
            Some('M') => out += &format!("{:02}", second / 60 % 60),
            Some('S') => out += &format!("{:02}", second % 60),
            Some('B') => out += month_name,
            Some('b') => out += &month_name[..3],
            Some('A') => out += weekday,
            Some('a') => out += &weekday[..3],
            Some('%') => out.push('%'),
            other => {
                out.push('%');
                out.extend(other);
            }
        }
    }
    out
}

/// Year, month and day of a number of days since 1 January 1970, in the Gregorian calendar.
///
/// Counts from 1 March of year 0, so that the leap day is the last of its year; eras are 400 years of 146,097 days.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// JSON on several lines, indented as serde_json does it, with numbers as Python writes them.
struct Indented<'a>(PrettyFormatter<'a>);

/// Forwards methods to the inner formatter.
macro_rules! as_it_is {
    ($($name:ident($($argument:ident)?);)*) => {
        $(fn $name<W: ?Sized + io::Write>(&mut self, writer: &mut W $(, $argument: bool)?) -> io::Result<()> {
            self.0.$name(writer $(, $argument)?)
        })*
    };
}

impl Formatter for Indented<'_> {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        OneLine.write_f64(writer, value)
    }

    as_it_is! {
        begin_array();
        end_array();
        begin_array_value(first);
        end_array_value();
        begin_object();
        end_object();
        begin_object_key(first);
        begin_object_value();
        end_object_value();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strftime_knows_the_calendar() {
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S", 0), "1970-01-01 00:00:00");
        assert_eq!(
            strftime("%a %d %b %Y, %A %B %y 100%% %q", 951_782_400),
            "Tue 29 Feb 2000, Tuesday February 00 100% %q"
        );
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S", 4_102_444_799), "2099-12-31 23:59:59");
    }

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e15, "1000000000000000.0"),
            (123_456_789_012_345.6, "123456789012345.6"),
            (1e16, "1e+16"),
            (5e-324, "5e-324"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
        ] {
            assert_eq!(repr(number), text);
        }
    }

    #[test]
    fn json_is_spaced_as_python_spaces_it() {
        let value = Value::from(minijinja::value::Serde(
            serde_json::json!({"a": [1, 2.5, "é<&>'"], "b": {"c": null, "d": true}, "e": {}}),
        ));
        assert_eq!(
            json_dumps(&value, None).unwrap(),
            r#"{"a": [1, 2.5, "é<&>'"], "b": {"c": null, "d": true}, "e": {}}"#
        );
        assert_eq!(json_dumps(&Value::from(vec![1, 2]), Some(2)).unwrap(), "[\n  1,\n  2\n]");
        let value = Value::from(minijinja::value::Serde(serde_json::json!({"a": [1e-7, {}], "b": []})));
        assert_eq!(json_dumps(&value, Some(1)).unwrap(), "{\n \"a\": [\n  1e-07,\n  {}\n ],\n \"b\": []\n}");
    }
}
