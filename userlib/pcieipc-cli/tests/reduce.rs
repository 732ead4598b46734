// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reduces over shared memory: the sum is right, written whole, and told.

mod harness;

use std::{fs, path::Path};

use harness::{data, good, listing, run};
use safetensors::{Dtype, SafeTensors};

fn values(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
        Dtype::BF16 => bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect(),
        Dtype::F64 => bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
        other => panic!("{other:?}"),
    }
}

/// Compares a written sum with the one that numpy made, name for name and element for element.
fn agrees_with_numpy(sum: &Path, numpy: &str, unit: f64) {
    let (sum, numpy) = (fs::read(sum).unwrap(), fs::read(data(numpy)).unwrap());
    let (sum, numpy) = (SafeTensors::deserialize(&sum).unwrap(), SafeTensors::deserialize(&numpy).unwrap());
    assert_eq!(sum.len(), numpy.len());
    for (name, exact) in numpy.iter() {
        let got = sum.tensor(name).unwrap();
        assert_eq!(got.shape(), exact.shape(), "{name}");
        let (got, exact) = (values(got.data(), got.dtype()), values(exact.data(), Dtype::F64));
        let largest = exact.iter().fold(0f64, |most, value| most.max(value.abs()));
        for (got, exact) in got.iter().zip(&exact) {
            assert!((got - exact).abs() <= 4.0 * unit * largest, "{name}: {got} is not {exact}");
        }
    }
}

fn reduce_real(input: &str, extra: &[&str]) -> (tempfile::TempDir, serde_json::Value) {
    let directory = tempfile::tempdir().unwrap();
    let template = data(input);
    let mut arguments =
        vec!["reduce", "--ranks=4", "--transport=shm", "--check", "--json", "--output=sum.safetensors", "--input"];
    arguments.push(template.to_str().unwrap());
    arguments.extend(extra);
    let ran = run(directory.path(), &arguments);
    let told = ran.succeeds().json();
    assert_eq!(listing(directory.path()), ["sum.safetensors"]);
    (directory, told)
}

#[test]
fn real_f32_gradients_sum_to_what_numpy_says_with_both_algorithms_and_in_checked_mode() {
    let mut sums = Vec::new();
    for extra in [&["--algorithm=two-shot"][..], &["--algorithm=ring"], &["--checked"]] {
        let (directory, told) = reduce_real("grads.{rank}.safetensors", extra);
        agrees_with_numpy(&directory.path().join("sum.safetensors"), "grads.sum.safetensors", 2f64.powi(-24));
        assert_eq!(told["ok"], true);
        assert_eq!(told["transport"], "shm");
        assert_eq!(told["total"]["wrong"], 0);
        assert_eq!(told["total"]["same_bits"], true);
        assert_eq!(told["total"]["bytes"], 344_208);
        assert_eq!(told["tensors"].as_array().unwrap().len(), 24);
        sums.push(fs::read(directory.path().join("sum.safetensors")).unwrap());
    }
    assert_eq!(sums[0].len(), sums[1].len());
}

#[test]
fn real_bf16_gradients_are_rounded_once() {
    let (directory, told) = reduce_real("grads-bf16.{rank}.safetensors", &[]);
    // Half a unit of bf16's last place against the largest element, a fourth of what the comparison allows.
    agrees_with_numpy(&directory.path().join("sum.safetensors"), "grads-bf16.sum.safetensors", 2f64.powi(-9));
    assert_eq!(told["total"]["wrong"], 0);
    assert_eq!(told["total"]["bytes"], 172_104);
}

#[test]
fn a_second_run_gives_the_same_bytes() {
    let bytes = || {
        let (directory, _) = reduce_real("grads.{rank}.safetensors", &[]);
        fs::read(directory.path().join("sum.safetensors")).unwrap()
    };
    assert_eq!(bytes(), bytes());
}

#[test]
fn groups_of_one_to_five_ranks_are_right() {
    for ranks in 1..=5 {
        let directory = good(ranks);
        let count = ranks.to_string();
        let arguments = [
            "reduce",
            "--ranks",
            &count,
            "--input=grads.{rank}.safetensors",
            "--output=sum.safetensors",
            "--transport=shm",
            "--check",
            "--json",
        ];
        let told = run(directory.path(), &arguments).succeeds().json();
        assert_eq!(told["total"]["wrong"], 0);
        let sum = fs::read(directory.path().join("sum.safetensors")).unwrap();
        let bias = values(SafeTensors::deserialize(&sum).unwrap().tensor("bias").unwrap().data(), Dtype::F32);
        let ids: f64 = (0..ranks).map(|rank| rank as f64).sum();
        assert_eq!(bias, [ids, -ids, 7.0 * ranks as f64]);
    }
}

#[test]
fn auto_without_the_module_takes_shared_memory_and_says_why() {
    if Path::new("/dev/pcieipc").exists() {
        eprintln!("skipped: this machine has the module");
        return;
    }
    let directory = good(2);
    let ran = run(directory.path(), &["reduce", "--ranks=2", "--input=grads.{rank}.safetensors", "--output=sum.safetensors"]);
    ran.succeeds();
    assert!(ran.err.contains("transport: shm (/dev/pcieipc is not there: load the module"), "{}", ran.err);
}

#[test]
fn the_table_names_every_tensor_and_says_when_nobody_checked() {
    let directory = good(2);
    let ran = run(
        directory.path(),
        &["reduce", "--ranks=2", "--input=grads.{rank}.safetensors", "--output=sum.safetensors", "--transport=shm"],
    );
    ran.succeeds();
    for part in ["weight", "bias", "all 2", "doorbells", "interrupts", "wakeups", "unchecked"] {
        assert!(ran.out.contains(part), "{part} is not in {}", ran.out);
    }
}

#[test]
fn an_existing_output_is_replaced_whole_and_is_readable_by_others() {
    use std::os::unix::fs::PermissionsExt;
    let directory = good(2);
    let output = directory.path().join("sum.safetensors");
    fs::write(&output, "what was there before").unwrap();
    run(
        directory.path(),
        &["reduce", "--ranks=2", "--input=grads.{rank}.safetensors", "--output=sum.safetensors", "--transport=shm"],
    )
    .succeeds();
    let sum = fs::read(&output).unwrap();
    assert_eq!(SafeTensors::deserialize(&sum).unwrap().len(), 2);
    assert_eq!(fs::metadata(&output).unwrap().permissions().mode() & 0o400, 0o400);
}

#[test]
fn empty_tensors_and_scalars_pass_through() {
    let directory = tempfile::tempdir().unwrap();
    for rank in 0..3 {
        let tensors = [harness::f32s("empty", &[0, 4], &[]), harness::f32s("scalar", &[], &[0.5])];
        harness::write(&directory.path().join(format!("grads.{rank}.safetensors")), &tensors);
    }
    let arguments =
        ["reduce", "--ranks=3", "--input=grads.{rank}.safetensors", "--output=sum.safetensors", "--transport=shm", "--check"];
    run(directory.path(), &arguments).succeeds();
    let sum = fs::read(directory.path().join("sum.safetensors")).unwrap();
    let sum = SafeTensors::deserialize(&sum).unwrap();
    assert_eq!(sum.tensor("empty").unwrap().shape(), [0, 4]);
    assert_eq!(values(sum.tensor("scalar").unwrap().data(), Dtype::F32), [1.5]);
}
