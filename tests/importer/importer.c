// SPDX-License-Identifier: GPL-2.0
/*
 * A driver that imports dma-bufs, as the module's tests need one: /dev/importer maps a dma-buf for the DMA of a PCI device and tells the addresses,
 * which no driver outside of a test would do. One open file is one attachment.
 *
 * write "attach FD 0000:00:00.0 WAY"   WAY 0: as a driver that wants struct pages; 1: without; 2: without, and it lets go when it is told
 * write "map", write "unmap"
 * write "begin", write "finish"        its device has begun something with the buffer, by a fence, and has finished it
 * write "hold"                         from now on it takes its time to let go when it is told: until "go", 20 seconds at most
 * write "await", write "go"            waits until it is told; lets go, and keeps nobody waiting any more
 * read                                 "mapped ADDRESS BYTES" or "unmapped", and how often it was told
 */
#include <linux/completion.h>
#include <linux/dma-buf.h>
#include <linux/dma-fence.h>
#include <linux/dma-resv.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Imports dma-bufs, for tests");
MODULE_IMPORT_NS("DMA_BUF");

struct import {
	struct mutex lock;
	struct pci_dev *pdev;
	struct dma_buf *buf;
	struct dma_buf_attachment *attachment;
	/* Under the buffer's reservation. */
	struct sg_table *table;
	unsigned int told;
	bool hold;
	struct completion reached, go;
	struct dma_fence *fence;
};

#define HOLD (20 * HZ)

static DEFINE_SPINLOCK(fences);

static const char *name(struct dma_fence *fence)
{
	return "importer";
}

static const struct dma_fence_ops fence_ops = { .get_driver_name = name, .get_timeline_name = name };

static int begin(struct import *import)
{
	int error;

	if (!import->attachment || import->fence)
		return -EINVAL;
	import->fence = kzalloc(sizeof(*import->fence), GFP_KERNEL);
	if (!import->fence)
		return -ENOMEM;
	dma_fence_init(import->fence, &fence_ops, &fences, dma_fence_context_alloc(1), 1);
	dma_resv_lock(import->buf->resv, NULL);
	error = dma_resv_reserve_fences(import->buf->resv, 1);
	if (!error)
		dma_resv_add_fence(import->buf->resv, import->fence, DMA_RESV_USAGE_BOOKKEEP);
	dma_resv_unlock(import->buf->resv);
	return error;
}

static void finish(struct import *import)
{
	if (!import->fence)
		return;
	dma_fence_signal(import->fence);
	dma_fence_put(import->fence);
	import->fence = NULL;
}

static void unmap(struct import *import)
{
	if (import->table)
		dma_buf_unmap_attachment(import->attachment, import->table, DMA_BIDIRECTIONAL);
	import->table = NULL;
}

static void told(struct dma_buf_attachment *attachment)
{
	struct import *import = attachment->importer_priv;

	if (READ_ONCE(import->hold)) {
		complete_all(&import->reached);
		wait_for_completion_timeout(&import->go, HOLD);
	}
	unmap(import);
	import->told++;
}

static const struct dma_buf_attach_ops peer = { .allow_peer2peer = true };
static const struct dma_buf_attach_ops revocable_peer = { .allow_peer2peer = true, .invalidate_mappings = told };

static int attach(struct import *import, int fd, const char *address, unsigned int way)
{
	static const struct dma_buf_attach_ops *const ways[] = { NULL, &peer, &revocable_peer };
	unsigned int domain, bus, slot, function;

	if (import->attachment || way >= ARRAY_SIZE(ways) || sscanf(address, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		return -EINVAL;
	import->pdev = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, function));
	if (!import->pdev)
		return -ENODEV;
	import->buf = dma_buf_get(fd);
	if (IS_ERR(import->buf)) {
		int error = PTR_ERR(import->buf);

		import->buf = NULL;
		pci_dev_put(import->pdev);
		return error;
	}
	import->attachment = dma_buf_dynamic_attach(import->buf, &import->pdev->dev, ways[way], import);
	if (IS_ERR(import->attachment)) {
		int error = PTR_ERR(import->attachment);

		import->attachment = NULL;
		dma_buf_put(import->buf);
		pci_dev_put(import->pdev);
		return error;
	}
	return 0;
}

static int map(struct import *import)
{
	int error = 0;

	if (!import->attachment)
		return -ENOTCONN;
	dma_resv_lock(import->buf->resv, NULL);
	if (!import->table) {
		struct sg_table *table = dma_buf_map_attachment(import->attachment, DMA_BIDIRECTIONAL);

		if (IS_ERR(table))
			error = PTR_ERR(table);
		else
			import->table = table;
	}
	dma_resv_unlock(import->buf->resv);
	return error;
}

static ssize_t importer_write(struct file *file, const char __user *from, size_t bytes, loff_t *at)
{
	struct import *import = file->private_data;
	char text[64] = "", address[16] = "";
	unsigned int way;
	int fd, error = -EINVAL;

	if (bytes >= sizeof(text) || copy_from_user(text, from, bytes))
		return -EFAULT;
	mutex_lock(&import->lock);
	if (sscanf(text, "attach %d %15s %u", &fd, address, &way) == 3) {
		error = attach(import, fd, address, way);
	} else if (sysfs_streq(text, "map")) {
		error = map(import);
	} else if (sysfs_streq(text, "unmap") && import->attachment) {
		dma_resv_lock(import->buf->resv, NULL);
		unmap(import);
		dma_resv_unlock(import->buf->resv);
		error = 0;
	} else if (sysfs_streq(text, "begin")) {
		error = begin(import);
	} else if (sysfs_streq(text, "finish")) {
		finish(import);
		error = 0;
	} else if (sysfs_streq(text, "hold")) {
		reinit_completion(&import->reached);
		reinit_completion(&import->go);
		WRITE_ONCE(import->hold, true);
		error = 0;
	} else if (sysfs_streq(text, "await")) {
		error = wait_for_completion_timeout(&import->reached, HOLD) ? 0 : -ETIMEDOUT;
	} else if (sysfs_streq(text, "go")) {
		WRITE_ONCE(import->hold, false);
		complete_all(&import->go);
		error = 0;
	}
	mutex_unlock(&import->lock);
	return error ? error : bytes;
}

static ssize_t importer_read(struct file *file, char __user *into, size_t bytes, loff_t *at)
{
	struct import *import = file->private_data;
	char text[96];
	int length;

	mutex_lock(&import->lock);
	if (!import->attachment) {
		mutex_unlock(&import->lock);
		return -ENOTCONN;
	}
	dma_resv_lock(import->buf->resv, NULL);
	if (import->table)
		length = scnprintf(text, sizeof(text), "mapped %llu %u %u\n", (u64)sg_dma_address(import->table->sgl),
				   sg_dma_len(import->table->sgl), import->told);
	else
		length = scnprintf(text, sizeof(text), "unmapped 0 0 %u\n", import->told);
	dma_resv_unlock(import->buf->resv);
	mutex_unlock(&import->lock);
	if (bytes < length || copy_to_user(into, text, length))
		return -EFAULT;
	return length;
}

static int importer_open(struct inode *inode, struct file *file)
{
	struct import *import = kzalloc(sizeof(*import), GFP_KERNEL);

	if (!import)
		return -ENOMEM;
	mutex_init(&import->lock);
	init_completion(&import->reached);
	init_completion(&import->go);
	file->private_data = import;
	return 0;
}

static int importer_release(struct inode *inode, struct file *file)
{
	struct import *import = file->private_data;

	finish(import);
	if (import->attachment) {
		dma_resv_lock(import->buf->resv, NULL);
		unmap(import);
		dma_resv_unlock(import->buf->resv);
		dma_buf_detach(import->buf, import->attachment);
		dma_buf_put(import->buf);
		pci_dev_put(import->pdev);
	}
	kfree(import);
	return 0;
}

static const struct file_operations importer_fops = {
	.owner = THIS_MODULE,
	.open = importer_open,
	.release = importer_release,
	.read = importer_read,
	.write = importer_write,
};

static struct miscdevice importer = { .minor = MISC_DYNAMIC_MINOR, .name = "importer", .fops = &importer_fops, .mode = 0600 };
module_misc_device(importer);
