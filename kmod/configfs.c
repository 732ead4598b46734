// SPDX-License-Identifier: GPL-2.0
/*
 * The Rust abstraction of configfs in Linux 7.3 unregisters what it could not register, which is a pointer to nowhere: the module's one subsystem
 * is registered and unregistered by way of these (Kbuild says so to the linker), so that loading it fails in order.
 */
#include <linux/configfs.h>

int __real_configfs_register_subsystem(struct configfs_subsystem *subsys);
void __real_configfs_unregister_subsystem(struct configfs_subsystem *subsys);
int __wrap_configfs_register_subsystem(struct configfs_subsystem *subsys);
void __wrap_configfs_unregister_subsystem(struct configfs_subsystem *subsys);

/* Loading and unloading are one after the other. */
static bool registered;

int __wrap_configfs_register_subsystem(struct configfs_subsystem *subsys)
{
	int error = __real_configfs_register_subsystem(subsys);

	registered = !error;
	return error;
}

void __wrap_configfs_unregister_subsystem(struct configfs_subsystem *subsys)
{
	if (registered)
		__real_configfs_unregister_subsystem(subsys);
	registered = false;
}
