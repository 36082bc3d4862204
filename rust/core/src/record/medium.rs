//! The name of a tier, as readers expect it.
//!
//! Readers compare media by their text and route by it: a device's name in its place (`cuda:0`, `cpu`), or
//! another case, is another tier to them.

use crate::error::RecordError;

/// Tiers that real producers name, in upper case.
const KNOWN: [&str; 10] = [
    "GPU",
    "CPU",
    "STORAGE",
    "DISK",
    "EXTERNAL",
    "CPU_PINNED",
    "CPU_TIER1",
    "CPU_TIER2",
    "SHARED_STORAGE",
    "OBJECT_STORE",
];

/// Devices whose memory is the GPU tier.
const DEVICES: [&str; 7] = ["cuda", "hip", "xpu", "npu", "mps", "musa", "gpu"];

/// What a connector calls a medium, as it goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium<'a> {
    /// As it was given: upper case.
    Canonical(&'a str),
    /// Another spelling of this tier, or a device that has it.
    Means(&'static str),
}

/// Reads the name of a medium.
///
/// # Errors
/// [`RecordError::Medium`] for what is neither upper case nor another spelling of a known tier.
pub fn read_medium(name: &str) -> Result<Medium<'_>, RecordError> {
    let upper = |b: &u8| b.is_ascii_uppercase() || b.is_ascii_digit() || *b == b'_';
    if !name.is_empty() && name.len() <= 64 && name.as_bytes().iter().all(upper) {
        return Ok(Medium::Canonical(name));
    }
    let device = name.split_once(':').map_or(name, |(device, _)| device);
    if DEVICES.iter().any(|d| d.eq_ignore_ascii_case(device)) {
        return Ok(Medium::Means("GPU"));
    }
    // `cpu:0` is a device, `disk:0` is not.
    let tier = if device.eq_ignore_ascii_case("cpu") { device } else { name };
    KNOWN
        .into_iter()
        .find(|k| k.eq_ignore_ascii_case(tier))
        .map(Medium::Means)
        .ok_or_else(|| RecordError::Medium { seen: name.chars().take(64).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upper_case_goes_out_as_it_is_and_devices_and_spellings_are_their_tier() {
        for name in ["GPU", "CPU", "MY_TIER2"] {
            assert_eq!(read_medium(name), Ok(Medium::Canonical(name)));
        }
        for (name, tier) in [
            ("cpu", "CPU"),
            ("Cpu", "CPU"),
            ("cpu:0", "CPU"),
            ("cuda:0", "GPU"),
            ("cuda", "GPU"),
            ("gpu", "GPU"),
            ("storage", "STORAGE"),
            ("Shared_Storage", "SHARED_STORAGE"),
        ] {
            assert_eq!(read_medium(name), Ok(Medium::Means(tier)), "{name}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let long = "A".repeat(65);
        for name in ["", "my tier", "disk:0", "device(type='cpu')", "ramdisk", &long] {
            assert!(matches!(read_medium(name), Err(RecordError::Medium { .. })), "{name}");
        }
    }
}
