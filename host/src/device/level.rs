//! Levels of kernels: which instructions they use, and so on which cards they run.

use std::fmt;
use std::str::FromStr;

/// A level that kernels are compiled for. Each has the instructions of the levels before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// For every card from compute capability 8.0 on.
    Sm80,
    /// For every card from compute capability 9.0 on: adds bulk copies, TMA, clusters and launches that begin early.
    Sm90,
    /// For Hopper (9.0) only: adds `wgmma`, and registers that warpgroups pass to each other (`setmaxnreg`).
    Sm90a,
}

impl Level {
    /// All levels, in order.
    pub const ALL: [Self; 3] = [Self::Sm80, Self::Sm90, Self::Sm90a];

    /// The level's name, as compilers spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90 => "sm_90",
            Self::Sm90a => "sm_90a",
        }
    }

    /// Whether its kernels run on cards of this compute capability.
    pub fn runs_on(self, capability: (i32, i32)) -> bool {
        match self {
            Self::Sm80 => capability >= (8, 0),
            Self::Sm90 => capability >= (9, 0),
            Self::Sm90a => capability == (9, 0),
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|level| level.name() == name);
        found.ok_or_else(|| format!("there is no level {name}: it is sm_80, sm_90 or sm_90a"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_by_their_names() {
        for level in Level::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        assert!("sm_100".parse::<Level>().unwrap_err().contains("sm_100"));
    }
}
