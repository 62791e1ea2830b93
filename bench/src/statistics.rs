//! Medians and percentiles of measured times.

/// The value below which `share` (0 to 1) of the values lie, by linear interpolation; 0 of none.
pub fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return 0.0 };
    let place = share.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    let at = |place: usize| values.get(place).copied().unwrap_or(0.0);
    at(below) + (at(above) - at(below)) * (place - place.floor())
}

/// The middle value.
pub fn median(values: &mut [f64]) -> f64 {
    percentile(values, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        assert_eq!(median(&mut []), 0.0);
        assert_eq!(median(&mut [7.0]), 7.0);
        assert_eq!(median(&mut [9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&mut [4.0, 1.0]), 2.5);
        assert_eq!(percentile(&mut [0.0, 10.0, 20.0], 0.9), 18.0);
        assert_eq!(percentile(&mut [0.0, 10.0], 7.0), 10.0);
    }
}
