// SPDX-License-Identifier: MIT OR Apache-2.0
//! When a link is taken.

/// The times in which a directed link carries something. What waits elsewhere first, and comes to this link later, does not keep
/// those away that come before it.
#[derive(Debug, Clone, Default)]
pub struct Occupancy {
    /// From and to, in order, with room between any two.
    spans: Vec<(f64, f64)>,
    busy: f64,
}

impl Occupancy {
    /// Takes the link for so long, as early as it has that much time from `begin` on; gives when that is.
    pub fn take(&mut self, begin: f64, time: f64) -> f64 {
        let first = self.spans.partition_point(|span| span.1 <= begin);
        let (mut at, mut start) = (first, begin);
        while let Some(span) = self.spans.get(at).filter(|span| span.0 < start + time || span.0 <= start) {
            start = start.max(span.1);
            at += 1;
        }
        if time > 0.0 {
            self.busy += time;
            let end = start + time;
            let after = self.spans.get(at).filter(|span| span.0 <= end).map(|span| span.1);
            match (at.checked_sub(1).filter(|before| self.spans[*before].1 >= start), after) {
                (Some(before), Some(end)) => {
                    self.spans[before].1 = end;
                    self.spans.remove(at);
                }
                (Some(before), None) => self.spans[before].1 = end,
                (None, Some(_)) => self.spans[at].0 = start,
                (None, None) => self.spans.insert(at, (start, end)),
            }
        }
        start
    }

    /// How long it was taken in all.
    pub fn busy(&self) -> f64 {
        self.busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_first_goes_first_and_what_fits_in_between_goes_in_between() {
        let mut link = Occupancy::default();
        assert_eq!(link.take(10.0, 5.0), 10.0);
        assert_eq!(link.take(12.0, 1.0), 15.0);
        assert_eq!(link.take(0.0, 4.0), 0.0);
        assert_eq!(link.take(2.0, 6.0), 4.0);
        assert_eq!(link.take(2.0, 1.0), 16.0);
        assert_eq!(link.spans, [(0.0, 17.0)]);
        assert_eq!(link.busy(), 17.0);
    }

    #[test]
    fn what_takes_no_time_waits_but_leaves_no_trace() {
        let mut link = Occupancy::default();
        link.take(1.0, 2.0);
        assert_eq!((link.take(2.0, 0.0), link.take(0.5, 0.0)), (3.0, 0.5));
        assert_eq!((link.spans.len(), link.busy()), (1, 2.0));
    }
}
