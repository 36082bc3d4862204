#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kvevents_fuzz::index_dump(data));
