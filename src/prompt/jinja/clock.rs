//! The time that templates ask for.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::Error;

use super::unforeseen;

/// A moment in UTC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    year: i64,
    month: i64,
    day: i64,
    /// Seconds of the day.
    second: i64,
    /// 0 is Thursday, the weekday of 1970-01-01.
    weekday: i64,
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
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

impl Moment {
    pub fn now() -> Moment {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Moment::from_unix(i64::try_from(seconds).unwrap_or(0))
    }

    pub fn from_unix(seconds: i64) -> Moment {
        let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // Years that begin in March put the leap day last; 400 of them have 146,097 days.
        let from_march = days + 719_468;
        let era = from_march.div_euclid(146_097);
        let of_era = from_march.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        Moment {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month,
            day: of_year - (153 * from_march + 2) / 5 + 1,
            second,
            weekday: days.rem_euclid(7),
        }
    }

    /// `strftime` in the C locale.
    pub fn strftime(&self, format: &str) -> Result<String, Error> {
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = rest.next();
            let pad = code != Some('-');
            if !pad {
                code = rest.next();
            }
            out.push_str(&self.field(code, pad).ok_or_else(|| unforeseen(format))?);
        }
        Ok(out)
    }

    fn field(&self, code: Option<char>, pad: bool) -> Option<String> {
        let two = |value: i64| if pad { format!("{value:02}") } else { value.to_string() };
        let (hour, minute) = (self.second / 3600, self.second / 60 % 60);
        let at =
            |names: &[&str], index: i64| usize::try_from(index).ok().map(|at| names[at].to_owned());
        let name = |names: &[&str], index: i64, short: bool| {
            at(names, index).map(|name| if short { name[..3].to_owned() } else { name })
        };
        Some(match code? {
            'Y' => self.year.to_string(),
            'y' => two(self.year.rem_euclid(100)),
            'm' => two(self.month),
            'd' => two(self.day),
            'e' => format!("{:>2}", self.day),
            'H' => two(hour),
            'I' => two((hour + 11) % 12 + 1),
            'M' => two(minute),
            'S' => two(self.second % 60),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => name(&MONTHS, self.month - 1, false)?,
            'b' | 'h' => name(&MONTHS, self.month - 1, true)?,
            'A' => name(&DAYS, self.weekday, false)?,
            'a' => name(&DAYS, self.weekday, true)?,
            'F' => self.strftime("%Y-%m-%d").ok()?,
            'T' => self.strftime("%H:%M:%S").ok()?,
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            // A naive time has no zone.
            'Z' | 'z' => String::new(),
            _ => return None,
        })
    }
}
