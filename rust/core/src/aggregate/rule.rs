//! When enough workers hold a block.

use crate::error::AggregateError;

/// Most workers that one aggregator serves.
pub const MAX_WORKERS: u32 = 1024;

/// How many workers must hold a block before it counts as resident.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Rule {
    /// Every worker: each stores its own shard.
    #[default]
    All,
    /// One is enough: every worker stores the whole block.
    Any,
    /// At least this many, whichever they are.
    KOf(u32),
    /// Every subset reaches its own number: replicated heads inside every pipeline stage.
    Quorum(Vec<(Vec<u32>, u32)>),
}

/// The rules of one source: one for all groups, and exceptions by group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Where no other rule is given.
    pub default: Rule,
    /// `(group_idx, rule)`.
    pub groups: Vec<(Option<i64>, Rule)>,
}

impl Rules {
    pub(super) fn of_group(&self, group: Option<i64>) -> &Rule {
        self.groups.iter().find(|(g, _)| *g == group).map_or(&self.default, |(_, r)| r)
    }

    pub(super) fn check(&self, workers: u32) -> Result<(), AggregateError> {
        if workers == 0 || workers > MAX_WORKERS {
            return Err(AggregateError::Workers { seen: workers, limit: MAX_WORKERS });
        }
        self.default.test(workers)?;
        for (i, (group, rule)) in self.groups.iter().enumerate() {
            rule.test(workers)?;
            if self.groups[..i].iter().any(|(g, _)| g == group) {
                return Err(AggregateError::Rule(format!("group {group:?} has two rules")));
            }
        }
        Ok(())
    }
}

/// A rule for a fixed number of workers, in the form that is fast to ask.
#[derive(Clone, Debug)]
pub(super) enum Test {
    AtLeast(u32),
    Masks(Vec<(Vec<u64>, u32)>),
}

fn ones(words: &[u64]) -> u32 {
    words.iter().map(|w| w.count_ones()).sum()
}

impl Rule {
    pub(super) fn test(&self, workers: u32) -> Result<Test, AggregateError> {
        let bad = |why: String| Err(AggregateError::Rule(why));
        match self {
            Self::All => Ok(Test::AtLeast(workers)),
            Self::Any => Ok(Test::AtLeast(1)),
            Self::KOf(0) => bad("0 workers is no rule; use at least 1".into()),
            Self::KOf(k) if *k > workers => bad(format!("{k} workers asked for, there are {workers}")),
            Self::KOf(k) => Ok(Test::AtLeast(*k)),
            Self::Quorum(parts) if parts.is_empty() => bad("a quorum of no parts is always true".into()),
            Self::Quorum(parts) => {
                let mut masks = Vec::with_capacity(parts.len());
                for (i, (members, k)) in parts.iter().enumerate() {
                    let mut mask = vec![0; words_for(workers)];
                    for &w in members {
                        if w >= workers {
                            return bad(format!("part {i} of the quorum names worker {w} of {workers}"));
                        }
                        set(&mut mask, w);
                    }
                    let size = ones(&mask);
                    if *k == 0 || *k > size {
                        return bad(format!("part {i} of the quorum asks for {k} of {size} workers"));
                    }
                    masks.push((mask, *k));
                }
                Ok(Test::Masks(masks))
            }
        }
    }
}

impl Test {
    #[inline]
    pub fn holds(&self, votes: &[u64]) -> bool {
        match self {
            Self::AtLeast(1) => votes.iter().any(|&v| v != 0),
            Self::AtLeast(k) => ones(votes) >= *k,
            Self::Masks(masks) => masks.iter().all(|(mask, k)| {
                votes.iter().zip(mask).map(|(v, m)| (v & m).count_ones()).sum::<u32>() >= *k
            }),
        }
    }
}

/// Words of a bit set over so many workers.
pub(super) fn words_for(workers: u32) -> usize {
    workers.div_ceil(64) as usize
}

#[inline]
pub(super) fn is_set(votes: &[u64], worker: u32) -> bool {
    votes[(worker / 64) as usize] >> (worker % 64) & 1 != 0
}

#[inline]
pub(super) fn set(votes: &mut [u64], worker: u32) {
    votes[(worker / 64) as usize] |= 1 << (worker % 64);
}

#[inline]
pub(super) fn unset(votes: &mut [u64], worker: u32) {
    votes[(worker / 64) as usize] &= !(1 << (worker % 64));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn votes(workers: u32, who: &[u32]) -> Vec<u64> {
        let mut v = vec![0; words_for(workers)];
        for &w in who {
            set(&mut v, w);
        }
        v
    }

    #[test]
    fn every_rule_at_its_edge() {
        let all = Rule::All.test(130).unwrap();
        let everyone: Vec<u32> = (0..130).collect();
        assert!(all.holds(&votes(130, &everyone)));
        assert!(!all.holds(&votes(130, &everyone[..129])));
        assert!(!Rule::Any.test(3).unwrap().holds(&votes(3, &[])));
        assert!(Rule::Any.test(3).unwrap().holds(&votes(3, &[2])));
        let two = Rule::KOf(2).test(4).unwrap();
        assert!(!two.holds(&votes(4, &[1])) && two.holds(&votes(4, &[1, 3])));
        let stages = Rule::Quorum(vec![(vec![0, 1], 1), (vec![2, 3], 2)]).test(4).unwrap();
        assert!(stages.holds(&votes(4, &[1, 2, 3])));
        assert!(!stages.holds(&votes(4, &[0, 1, 2])));
    }

    #[test]
    fn rules_that_cannot_hold_are_refused() {
        for rule in [
            Rule::KOf(0),
            Rule::KOf(5),
            Rule::Quorum(vec![]),
            Rule::Quorum(vec![(vec![0, 4], 1)]),
            Rule::Quorum(vec![(vec![0, 0], 2)]),
            Rule::Quorum(vec![(vec![0], 0)]),
        ] {
            assert!(rule.test(4).is_err(), "{rule:?}");
        }
        assert!(Rules::default().check(0).is_err());
        assert!(Rules::default().check(MAX_WORKERS + 1).is_err());
        let twice = Rules { groups: vec![(Some(0), Rule::Any), (Some(0), Rule::All)], ..Rules::default() };
        assert!(twice.check(2).is_err());
    }
}
