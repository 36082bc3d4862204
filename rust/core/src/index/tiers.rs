//! Media folded into tiers by a stated rule.

/// Tiers in order of nearness. Names are matched without regard to case; `None` is the device.
///
/// | tier | media |
/// |---|---|
/// | 0 `GPU` | absent, `GPU`, `DEVICE`, `HBM` |
/// | 1 `CPU` | `CPU`, `CPU_PINNED`, `CPU_TIER1`, `HOST`, `HOST_PINNED`, `DRAM` |
/// | 2 `STORAGE` | `STORAGE`, `DISK`, `NVME`, `SSD`, `CPU_TIER2`, `SHARED_STORAGE`, `OBJECT_STORE` |
/// | 3 `EXTERNAL` | `EXTERNAL`, `NETWORK`, `REMOTE`, `SHARED` |
///
/// Anything else is a tier of its own under its own name, is never taken for the device, and counted.
pub const KNOWN: [&str; 4] = ["GPU", "CPU", "STORAGE", "EXTERNAL"];

/// Most tiers that an index tells apart; further unknown media share the last one, `OTHER`.
pub const MAX_TIERS: usize = 16;

/// The known tier of a medium.
pub fn fold(medium: Option<&str>) -> Option<usize> {
    let Some(medium) = medium else { return Some(0) };
    let upper = medium.to_ascii_uppercase();
    match upper.as_str() {
        "GPU" | "DEVICE" | "HBM" => Some(0),
        "CPU" | "CPU_PINNED" | "CPU_TIER1" | "HOST" | "HOST_PINNED" | "DRAM" => Some(1),
        "STORAGE" | "DISK" | "NVME" | "SSD" | "CPU_TIER2" | "SHARED_STORAGE" | "OBJECT_STORE" => Some(2),
        "EXTERNAL" | "NETWORK" | "REMOTE" | "SHARED" => Some(3),
        _ => None,
    }
}

/// The tiers of one index: the known ones, then unknown media as they were seen.
#[derive(Clone, Debug)]
pub struct Tiers {
    names: Vec<String>,
}

impl Default for Tiers {
    fn default() -> Self {
        Self { names: KNOWN.iter().map(|s| (*s).to_owned()).collect() }
    }
}

impl Tiers {
    /// The tier of a medium; unknown ones get the next number.
    pub fn of(&mut self, medium: Option<&str>) -> usize {
        if let Some(t) = fold(medium) {
            return t;
        }
        let name = medium.unwrap_or_default();
        if let Some(i) = self.names.iter().position(|n| n == name) {
            return i;
        }
        if self.names.len() == MAX_TIERS - 1 {
            self.names.push("OTHER".to_owned());
        }
        if self.names.len() < MAX_TIERS {
            self.names.push(name.to_owned());
        }
        self.names.len() - 1
    }

    /// The tiers of a dump; `None` where they do not begin with the known ones.
    pub fn of_names(names: Vec<String>) -> Option<Self> {
        names.starts_with(&Self::default().names).then_some(Self { names })
    }

    /// Names by number.
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelling_does_not_matter_and_unknown_media_stay_apart() {
        let mut t = Tiers::default();
        assert_eq!(t.of(None), t.of(Some("gpu")));
        assert_eq!(t.of(Some("Cpu")), 1);
        let cxl = t.of(Some("CXL"));
        assert!(cxl >= KNOWN.len() && t.of(Some("CXL")) == cxl && t.names()[cxl] == "CXL");
        for i in 0..100 {
            assert!(t.of(Some(&format!("m{i}"))) < MAX_TIERS);
        }
    }
}
