// SPDX-License-Identifier: GPL-2.0
/* The project's version, for modinfo and /sys/module/pcieipc/version; the module! macro of the kernel's Rust has no field for it. */
#include <linux/module.h>

MODULE_INFO(version, PCIEIPC_VERSION);
