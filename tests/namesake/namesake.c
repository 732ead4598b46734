// SPDX-License-Identifier: GPL-2.0
/*
 * While it is loaded there is a folder "pcieipc" in configfs, so that loading the module of that name fails when its devices are bound already. It
 * needs configfs, which the module needs too.
 */
#include <linux/configfs.h>
#include <linux/module.h>

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Has the name of pcieipc in configfs, for tests");

static const struct config_item_type type = { .ct_owner = THIS_MODULE };
static struct configfs_subsystem namesake = { .su_group = { .cg_item = { .ci_namebuf = "pcieipc", .ci_type = &type } } };

static int __init namesake_init(void)
{
	config_group_init(&namesake.su_group);
	mutex_init(&namesake.su_mutex);
	return configfs_register_subsystem(&namesake);
}

static void __exit namesake_exit(void)
{
	configfs_unregister_subsystem(&namesake);
}

module_init(namesake_init);
module_exit(namesake_exit);
