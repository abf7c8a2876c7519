//! One figure, measured in several rounds.

use std::fmt;

/// The values, round by round.
#[derive(Clone, Default)]
pub struct Series(Vec<f64>);

impl Series {
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub fn values(&self) -> &[f64] {
        &self.0
    }

    pub fn median(&self) -> f64 {
        median(&self.0)
    }

    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub fn max(&self) -> f64 {
        self.0.iter().copied().fold(0.0, f64::max)
    }

    /// The ratio, round by round: the machine may be slower in one round than in the next.
    pub fn over(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0[..] {
            [] => return f.write_str("-"),
            [only] => return f.write_str(&number(only)),
            _ => {}
        }
        write!(f, "{} ({}–{})", number(self.median()), number(self.min()), number(self.max()))
    }
}

/// The median. NaN if there are no values.
pub fn median(values: &[f64]) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Formats a figure: three digits if it has a fraction, otherwise with separators between thousands.
pub fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => thousands(v.round() as u64),
    }
}

fn thousands(value: u64) -> String {
    if value < 1000 { value.to_string() } else { format!("{},{:03}", thousands(value / 1000), value % 1000) }
}
