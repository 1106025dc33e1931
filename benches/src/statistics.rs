//! Statistics of many measurements of one thing.

/// Measurements, sorted.
#[derive(Clone, Debug)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Sorts these values; `None` if there are none, or one is NaN.
    pub fn new(mut values: Vec<f64>) -> Option<Self> {
        if values.is_empty() || values.iter().any(|v| v.is_nan()) {
            return None;
        }
        values.sort_by(f64::total_cmp);
        Some(Self(values))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The value that a `share` of the measurements (0 to 1) is below, interpolated between neighbours.
    pub fn quantile(&self, share: f64) -> f64 {
        let last = self.0.len() - 1;
        let place = share.clamp(0.0, 1.0) * last as f64;
        let (below, above) = (place.floor() as usize, place.ceil() as usize);
        let part = place - below as f64;
        self.0[below] * (1.0 - part) + self.0[above] * part
    }

    /// The median.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The distance from the 10th to the 90th percentile, as a share of the median: 0.02 says that most measurements
    /// lie within about 1 % of it.
    pub fn spread(&self) -> f64 {
        let median = self.median();
        if median == 0.0 { 0.0 } else { (self.quantile(0.9) - self.quantile(0.1)) / median }
    }
}

#[cfg(test)]
mod tests {
    use super::Samples;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!(Samples::new(vec![3.0, 1.0, 2.0]).unwrap().median(), 2.0);
        assert_eq!(Samples::new(vec![4.0, 1.0, 3.0, 2.0]).unwrap().median(), 2.5);
        assert_eq!(Samples::new(vec![7.0]).unwrap().median(), 7.0);
    }

    #[test]
    fn one_slow_measurement_moves_neither_median_nor_spread_far() {
        let mut values = vec![10.0; 20];
        values.push(1000.0);
        let samples = Samples::new(values).unwrap();
        assert_eq!((samples.median(), samples.spread()), (10.0, 0.0));
    }

    #[test]
    fn the_spread_is_the_middle_four_fifths() {
        let samples = Samples::new((0..=100).map(|i| 95.0 + f64::from(i) / 10.0).collect()).unwrap();
        assert!((samples.median() - 100.0).abs() < 1e-9);
        assert!((samples.spread() - 0.08).abs() < 1e-9, "{}", samples.spread());
        assert!((samples.quantile(0.0), samples.quantile(1.0)) == (95.0, 105.0));
    }

    #[test]
    fn nothing_and_no_number_have_no_median() {
        assert!(Samples::new(Vec::new()).is_none());
        assert!(Samples::new(vec![1.0, f64::NAN]).is_none());
    }

    #[test]
    fn of_zeros_the_spread_is_zero() {
        assert_eq!(Samples::new(vec![0.0; 3]).unwrap().spread(), 0.0);
    }
}
