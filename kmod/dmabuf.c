// SPDX-License-Identifier: GPL-2.0
/*
 * A range of a BAR as a dma-buf: what the operations of one need, for which the kernel's Rust has no abstraction. Whose range it is, and when it
 * may be reached, is decided in dmabuf.rs.
 */
#include <linux/completion.h>
#include <linux/dma-buf.h>
#include <linux/dma-buf-mapping.h>
#include <linux/dma-resv.h>
#include <linux/module.h>
#include <linux/pci-p2pdma.h>
#include <linux/slab.h>
#include <linux/wait.h>

MODULE_IMPORT_NS("DMA_BUF");

struct pcieipc_dmabuf {
	struct dma_buf *buf;
	/* Held by the owner. */
	struct pci_dev *pdev;
	/* Ends with the binding of pdev; used only while allowed. */
	struct p2pdma_provider *provider;
	struct phys_vec range;
	void *owner;
	wait_queue_head_t drained;
	/* Both change under the reservation of buf. */
	unsigned int mapped;
	bool allowed;
};

/* In inline.c. */
bool pcieipc_inline_ratelimit(void);
/* In dmabuf.rs: the last reference to the dma-buf is gone. */
void pcieipc_dmabuf_released(void *owner);

struct pcieipc_dmabuf *pcieipc_dmabuf_new(struct pci_dev *pdev, struct p2pdma_provider *provider, phys_addr_t start, size_t bytes, void *owner);
struct file *pcieipc_dmabuf_file(struct pcieipc_dmabuf *range);
void pcieipc_dmabuf_allow(struct pcieipc_dmabuf *range, bool allowed);

static int pcieipc_dmabuf_attach(struct dma_buf *buf, struct dma_buf_attachment *attachment)
{
	struct pcieipc_dmabuf *range = buf->priv;
	int error = 0;

	/* There are no struct pages, and the range may be taken back at any time. */
	if (!attachment->peer2peer || !dma_buf_attach_revocable(attachment))
		return -EOPNOTSUPP;
	/* While it is allowed pdev is bound, which the distance needs: the kernel remembers it with the binding. */
	dma_resv_lock(buf->resv, NULL);
	if (!range->allowed) {
		error = -ENODEV;
	} else if (pci_p2pdma_distance(range->pdev, attachment->dev, false) < 0) {
		/* Asked again, the core says what is between the two; without a limit, and users of the importing driver can cause it. */
		if (pcieipc_inline_ratelimit())
			pci_p2pdma_distance(range->pdev, attachment->dev, true);
		error = -EOPNOTSUPP;
	}
	dma_resv_unlock(buf->resv);
	return error;
}

static struct sg_table *pcieipc_dmabuf_map(struct dma_buf_attachment *attachment, enum dma_data_direction direction)
{
	struct pcieipc_dmabuf *range = attachment->dmabuf->priv;
	struct sg_table *table;

	dma_resv_assert_held(attachment->dmabuf->resv);
	if (!range->allowed)
		return ERR_PTR(-ENODEV);
	table = dma_buf_phys_vec_to_sgt(attachment, range->provider, &range->range, 1, range->range.len, direction);
	if (!IS_ERR(table))
		range->mapped++;
	return table;
}

static void pcieipc_dmabuf_unmap(struct dma_buf_attachment *attachment, struct sg_table *table, enum dma_data_direction direction)
{
	struct pcieipc_dmabuf *range = attachment->dmabuf->priv;

	dma_resv_assert_held(attachment->dmabuf->resv);
	/* What is freed is as many entries as there are for the CPU, and dma_buf_phys_vec_to_sgt says at last that these are none: 7.3 loses them. */
	table->orig_nents = table->nents;
	dma_buf_free_sgt(attachment, table, direction);
	if (!--range->mapped)
		wake_up_all(&range->drained);
}

static void pcieipc_dmabuf_release(struct dma_buf *buf)
{
	struct pcieipc_dmabuf *range = buf->priv;

	pcieipc_dmabuf_released(range->owner);
	kfree(range);
}

static const struct dma_buf_ops pcieipc_dmabuf_ops = {
	.attach = pcieipc_dmabuf_attach,
	.map_dma_buf = pcieipc_dmabuf_map,
	.unmap_dma_buf = pcieipc_dmabuf_unmap,
	.release = pcieipc_dmabuf_release,
};

/* Not allowed yet. The reference to the file is the caller's; the last one that is put ends it, and gives owner back. */
struct pcieipc_dmabuf *pcieipc_dmabuf_new(struct pci_dev *pdev, struct p2pdma_provider *provider, phys_addr_t start, size_t bytes, void *owner)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct pcieipc_dmabuf *range = kzalloc(sizeof(*range), GFP_KERNEL);
	struct dma_buf *buf;

	if (!range)
		return ERR_PTR(-ENOMEM);
	range->pdev = pdev;
	range->provider = provider;
	range->range.paddr = start;
	range->range.len = bytes;
	range->owner = owner;
	init_waitqueue_head(&range->drained);
	info.ops = &pcieipc_dmabuf_ops;
	info.size = bytes;
	info.flags = O_RDWR | O_CLOEXEC;
	info.priv = range;
	buf = dma_buf_export(&info);
	if (IS_ERR(buf)) {
		kfree(range);
		return ERR_CAST(buf);
	}
	range->buf = buf;
	return range;
}

struct file *pcieipc_dmabuf_file(struct pcieipc_dmabuf *range)
{
	return range->buf->file;
}

/*
 * Lets importers map it, or tells them to let go and waits until they have: they promised, when they attached, to do so soon. When this returns no
 * device reaches the range by it any more. It may be called while the last reference is being put, but not after pcieipc_dmabuf_released().
 */
void pcieipc_dmabuf_allow(struct pcieipc_dmabuf *range, bool allowed)
{
	struct dma_resv *resv = range->buf->resv;

	dma_resv_lock(resv, NULL);
	if (range->allowed != allowed) {
		range->allowed = allowed;
		dma_buf_invalidate_mappings(range->buf);
		/* Without a bound, because nothing else keeps the importer's device off; who makes everybody wait is on record. */
		while (!allowed && !dma_resv_wait_timeout(resv, DMA_RESV_USAGE_BOOKKEEP, false, 10 * HZ))
			pci_warn(range->pdev, "waits for a driver that has imported its memory and does not finish with it\n");
	}
	dma_resv_unlock(resv);
	while (!allowed && !wait_event_timeout(range->drained, !READ_ONCE(range->mapped), 10 * HZ))
		pci_warn(range->pdev, "waits for a driver that has imported its memory and does not let go\n");
}
