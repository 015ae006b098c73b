//! What users read when NVSHMEM is not as it should be: what was asked, what was found, what to do.
#![cfg(feature = "cuda")]

use deltalink::world::nvshmem::NvshmemError;
use nvshmem_sys::Version;

fn says(error: &NvshmemError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "`{part}` is missing in: {text}");
    }
}

#[test]
fn device_and_host_libraries_of_different_versions_are_named_with_rule_and_path() {
    let error = NvshmemError::DeviceVersion {
        module: "deltalink".into(),
        device: Version { major: 3, minor: 4, patch: 5 },
        host: Version { major: 3, minor: 8, patch: 0 },
        path: "/opt/nvshmem/lib/libnvshmem_host.so.3".into(),
    };
    let rule = "major and minor version must be the same";
    says(&error, &["linked with NVSHMEM 3.4.5", "host library is 3.8.0 (/opt/nvshmem", rule, "NVSHMEM_HOME"]);
}

#[test]
fn a_module_without_the_device_library_is_refused() {
    let error = NvshmemError::NoDeviceLibrary { module: "deltalink".into() };
    says(&error, &["module deltalink has no NVSHMEM device library", "nvshmemi_device_lib_version_d"]);
}

#[test]
fn a_process_that_takes_itself_for_the_only_pe_is_told_who_it_is() {
    let error = NvshmemError::Place { rank: 2, size: 4, found_rank: 0, found_size: 1 };
    says(&error, &["for PE 0 of 1", "started it as PE 2 of 4", "NVSHMEM_BOOTSTRAP"]);
}

#[test]
fn memory_that_is_short_is_told_with_what_is_free_and_the_granularity() {
    let error = NvshmemError::NoMemory { rank: 1, bytes: 1 << 30, free: 5000, total: 9000 };
    says(&error, &["no 1073741824 bytes", "on PE 1", "5000 of 9000 bytes", "NVSHMEM_CUMEM_GRANULARITY (512 MiB)"]);
}

#[test]
fn a_start_that_fails_names_the_pe_and_the_interface_variable() {
    let error = NvshmemError::Call { call: "nvshmemx_hostlib_init_attr", rank: 3, code: 7 };
    says(&error, &["nvshmemx_hostlib_init_attr ends with 7 on PE 3", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"]);
}

#[test]
fn one_machine_needs_neither_multicast_nor_a_remote_transport() {
    assert_eq!(nvshmem_sys::ONE_MACHINE, [("NVSHMEM_DISABLE_NVLS", "1"), ("NVSHMEM_REMOTE_TRANSPORT", "none")]);
}
