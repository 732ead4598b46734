// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bad use and bad files: exit code 2, the file and the tensor named, what to do, and nothing written.

mod harness;

use std::{fs, path::Path};

use harness::{Ran, f32s, good, listing, run, write};
use safetensors::Dtype;

const REDUCE: [&str; 8] =
    ["reduce", "--ranks", "4", "--input", "grads.{rank}.safetensors", "--output", "sum.safetensors", "--transport=shm"];

/// Runs reduce in a folder and checks that it left the folder as it was.
#[track_caller]
fn refused(directory: &Path, arguments: &[&str], says: &[&str]) -> Ran {
    let before = listing(directory);
    let ran = run(directory, arguments);
    ran.fails(2, says);
    assert_eq!(listing(directory), before);
    ran
}

#[test]
fn a_truncated_file_is_named_with_expected_and_real_length() {
    let directory = good(4);
    let path = directory.path().join("grads.2.safetensors");
    let whole = fs::read(&path).unwrap();
    for cut in [whole.len() - 1, whole.len() / 2, 9] {
        fs::write(&path, &whole[..cut]).unwrap();
        refused(
            directory.path(),
            &REDUCE,
            &["grads.2.safetensors", "truncated", &format!("the file has {cut}"), "write it again"],
        );
    }
    for cut in [7, 0] {
        fs::write(&path, &whole[..cut]).unwrap();
        refused(directory.path(), &REDUCE, &["grads.2.safetensors", "not a safetensors file", &format!("{cut} bytes")]);
    }
}

#[test]
fn bytes_after_the_last_tensor_are_refused() {
    let directory = good(4);
    let path = directory.path().join("grads.1.safetensors");
    let mut whole = fs::read(&path).unwrap();
    whole.push(0);
    fs::write(&path, whole).unwrap();
    refused(directory.path(), &REDUCE, &["grads.1.safetensors", "overlong"]);
}

#[test]
fn a_file_that_is_something_else_is_refused() {
    let directory = good(4);
    let path = directory.path().join("grads.0.safetensors");
    for (bytes, says) in [
        (&b"PK\x03\x04 a zip archive, not tensors"[..], "header of"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{}", "no tensor in it"),
        (b"\x04\0\0\0\0\0\0\0\xff\xfe\xfd\xfc", "not a safetensors file"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "header of 18446744073709551615"),
    ] {
        fs::write(&path, bytes).unwrap();
        refused(directory.path(), &REDUCE, &["grads.0.safetensors", says]);
    }
}

#[test]
fn a_header_whose_offsets_and_shapes_disagree_is_refused() {
    let directory = good(4);
    for entry in [
        r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1e99],"data_offsets":[0,8]}}"#,
    ] {
        let mut bytes = (entry.len() as u64).to_le_bytes().to_vec();
        bytes.extend(entry.as_bytes());
        bytes.extend([0; 8]);
        fs::write(directory.path().join("grads.3.safetensors"), bytes).unwrap();
        refused(directory.path(), &REDUCE, &["grads.3.safetensors", "not a safetensors file"]);
    }
}

#[test]
fn a_header_that_promises_more_than_there_is_in_the_world_is_refused() {
    let directory = good(4);
    for (elements, says) in [(1_usize << 58, "truncated"), (1 << 61, "not a safetensors file")] {
        let entry = format!(r#"{{"a":{{"dtype":"F32","shape":[{elements}],"data_offsets":[0,{}]}}}}"#, elements * 4);
        let mut bytes = (entry.len() as u64).to_le_bytes().to_vec();
        bytes.extend(entry.as_bytes());
        bytes.extend([0; 8]);
        fs::write(directory.path().join("grads.3.safetensors"), bytes).unwrap();
        refused(directory.path(), &REDUCE, &["grads.3.safetensors", says]);
    }
}

#[test]
fn a_tensor_of_a_wrong_type_is_named_with_its_type() {
    let directory = good(4);
    write(&directory.path().join("grads.0.safetensors"), &[("ids".into(), Dtype::I64, vec![2], vec![0; 16])]);
    refused(directory.path(), &REDUCE, &["grads.0.safetensors", "\"ids\"", "I64", "F32 and BF16"]);
}

#[test]
fn different_shapes_across_ranks_name_both_files_and_both_shapes() {
    let directory = good(4);
    let tensors = [f32s("weight", &[3, 2], &[0.0; 6]), f32s("bias", &[3], &[0.0; 3])];
    write(&directory.path().join("grads.3.safetensors"), &tensors);
    refused(directory.path(), &REDUCE, &["grads.3.safetensors", "grads.0.safetensors", "\"weight\"", "shape [3, 2]", "[2, 3]"]);
}

#[test]
fn different_types_across_ranks_name_both_types() {
    let directory = good(4);
    let tensors = [("weight".into(), Dtype::BF16, vec![2, 3], vec![0; 12]), f32s("bias", &[3], &[0.0; 3])];
    write(&directory.path().join("grads.1.safetensors"), &tensors);
    refused(directory.path(), &REDUCE, &["grads.1.safetensors", "\"weight\"", "type Bf16", "F32 in"]);
}

#[test]
fn a_tensor_that_one_rank_lacks_is_named_whichever_rank_it_is() {
    let directory = good(4);
    let bias = f32s("bias", &[3], &[0.0; 3]);
    write(&directory.path().join("grads.2.safetensors"), std::slice::from_ref(&bias));
    refused(directory.path(), &REDUCE, &["grads.2.safetensors: tensor \"weight\" is missing", "grads.0.safetensors has it"]);
    let more = [f32s("weight", &[2, 3], &[0.0; 6]), bias, f32s("extra", &[1], &[0.0])];
    write(&directory.path().join("grads.2.safetensors"), &more);
    refused(directory.path(), &REDUCE, &["grads.0.safetensors: tensor \"extra\" is missing", "grads.2.safetensors has it"]);
}

#[test]
fn a_missing_file_is_named() {
    let directory = good(3);
    refused(directory.path(), &REDUCE, &["grads.3.safetensors", "No such file"]);
}

#[test]
fn a_directory_or_a_pipe_as_input_is_refused_at_once() {
    let directory = good(3);
    let path = directory.path().join("grads.3.safetensors");
    fs::create_dir(&path).unwrap();
    refused(directory.path(), &REDUCE, &["grads.3.safetensors", "not a regular file"]);
    fs::remove_dir(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    let ran = refused(directory.path(), &REDUCE, &["grads.3.safetensors", "not a regular file"]);
    assert!(ran.took.as_secs() < 5);
}

#[test]
fn an_output_that_can_not_be_written_is_refused_before_anything_runs() {
    let directory = good(4);
    let mut arguments = REDUCE;
    arguments[6] = "nowhere/sum.safetensors";
    refused(directory.path(), &arguments, &["nowhere/sum.safetensors", "No such file"]);
    arguments[6] = ".";
    refused(directory.path(), &arguments, &["is a directory"]);
}

/// Device nodes are for root to make; a socket and a pipe stand for them elsewhere.
fn special_files(directory: &Path) -> Vec<String> {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let rights = Mode::from_bits_truncate(0o666);
    mknod(&directory.join("pipe"), SFlag::S_IFIFO, rights, 0).unwrap();
    mknod(&directory.join("socket"), SFlag::S_IFSOCK, rights, 0).unwrap();
    std::os::unix::fs::symlink("pipe", directory.join("link to a pipe")).unwrap();
    std::os::unix::fs::symlink("nothing", directory.join("link to nothing")).unwrap();
    let mut names = vec!["pipe", "socket", "link to a pipe", "link to nothing"];
    if mknod(&directory.join("null"), SFlag::S_IFCHR, rights, makedev(1, 3)).is_ok() {
        names.push("null");
    }
    names.into_iter().map(String::from).collect()
}

#[test]
fn an_output_that_is_no_file_is_refused_and_stays_what_it_is() {
    use std::os::unix::fs::MetadataExt;
    let directory = good(4);
    for name in special_files(directory.path()) {
        let path = directory.path().join(&name);
        let about = || fs::symlink_metadata(&path).map(|about| (about.ino(), about.mode(), about.rdev())).unwrap();
        let before = about();
        let mut arguments = REDUCE;
        arguments[6] = &name;
        refused(directory.path(), &arguments, &[&name, "name a file"]);
        assert_eq!(about(), before, "{name}");
    }
}

#[test]
fn an_output_that_is_an_input_is_refused() {
    let directory = good(4);
    let before = fs::read(directory.path().join("grads.1.safetensors")).unwrap();
    let mut arguments = REDUCE;
    arguments[6] = "./grads.1.safetensors";
    refused(directory.path(), &arguments, &["is the input", "must not overwrite"]);
    assert_eq!(fs::read(directory.path().join("grads.1.safetensors")).unwrap(), before);
}

#[test]
fn impossible_arguments_say_what_would_be_possible() {
    let directory = good(4);
    for (at, value, says) in [
        (2, "0", "1 to 16"),
        (2, "17", "1 to 16"),
        (2, "four", "1 to 16"),
        (4, "grads.safetensors", "'grads.{rank}.safetensors'"),
        (7, "--transport=tcp", "possible values: auto, kmod, shm"),
    ] {
        let mut arguments = REDUCE;
        arguments[at] = value;
        refused(directory.path(), &arguments, &[says]);
    }
    for (value, says) in [("0s", "1ns and 1h"), ("2h", "1ns and 1h"), ("soon", "500ms or 10s")] {
        let mut arguments = REDUCE.to_vec();
        arguments.extend(["--timeout", value]);
        refused(directory.path(), &arguments, &[says]);
    }
}

#[test]
fn with_json_a_refusal_is_one_object_on_standard_output() {
    let directory = good(3);
    let mut arguments = REDUCE.to_vec();
    arguments.push("--json");
    let told = refused(directory.path(), &arguments, &["grads.3.safetensors"]).json();
    assert_eq!(told["ok"], false);
    assert_eq!(told["exit"], 2);
    assert!(told["error"].as_str().unwrap().contains("grads.3.safetensors"));
}

#[test]
fn the_rank_command_without_a_job_is_refused() {
    let directory = good(1);
    refused(directory.path(), &["rank"], &["for pcieipc itself"]);
}
