// SPDX-License-Identifier: GPL-2.0
/*
 * Inline functions and macros of the kernel that its Rust bindings do not carry, each under its own name with a prefix.
 */
#include <linux/mm.h>
#include <linux/nospec.h>
#include <linux/io.h>
#include <linux/pci.h>
#include <linux/pci-p2pdma.h>
#include <linux/ratelimit.h>
#include <linux/security.h>
#include <linux/pgtable.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>

int pcieipc_inline_pci_domain_nr(struct pci_bus *bus);
int pcieipc_inline_pci_domain_nr(struct pci_bus *bus)
{
	return pci_domain_nr(bus);
}

bool pcieipc_inline_pci_channel_offline(struct pci_dev *pdev);
bool pcieipc_inline_pci_channel_offline(struct pci_dev *pdev)
{
	return pci_channel_offline(pdev);
}

bool pcieipc_inline_pci_dev_is_disconnected(struct pci_dev *pdev);
bool pcieipc_inline_pci_dev_is_disconnected(struct pci_dev *pdev)
{
	return pci_dev_is_disconnected(pdev);
}

/* Of a virtual function too, whose bus may have no bridge of its own. */
struct pci_dev *pcieipc_inline_pci_upstream_bridge(struct pci_dev *pdev);
struct pci_dev *pcieipc_inline_pci_upstream_bridge(struct pci_dev *pdev)
{
	return pci_upstream_bridge(pdev);
}

/* I/O ports cannot be mapped to users, and their cookies are no addresses. */
bool pcieipc_inline_is_memory_or_absent(struct pci_dev *pdev, int bar);
bool pcieipc_inline_is_memory_or_absent(struct pci_dev *pdev, int bar)
{
	return !pci_resource_len(pdev, bar) || (pci_resource_flags(pdev, bar) & IORESOURCE_MEM);
}

void *pcieipc_inline_page_address(struct page *page);
void *pcieipc_inline_page_address(struct page *page)
{
	return page_address(page);
}

unsigned long pcieipc_inline_page_to_pfn(struct page *page);
unsigned long pcieipc_inline_page_to_pfn(struct page *page)
{
	return page_to_pfn(page);
}

void pcieipc_inline_vma_noncached(struct vm_area_struct *vma);
void pcieipc_inline_vma_noncached(struct vm_area_struct *vma)
{
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY);
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
}

void pcieipc_inline_vma_writecombined(struct vm_area_struct *vma);
void pcieipc_inline_vma_writecombined(struct vm_area_struct *vma)
{
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY);
	vma->vm_page_prot = pgprot_writecombine(vma->vm_page_prot);
}

/* Some kernels have these as functions, others as empty inline ones. */
int pcieipc_inline_lockdown_dev_mem(void);
int pcieipc_inline_lockdown_dev_mem(void)
{
	return security_locked_down(LOCKDOWN_DEV_MEM);
}

int pcieipc_inline_reserve_memtype_wc(resource_size_t start, resource_size_t size);
int pcieipc_inline_reserve_memtype_wc(resource_size_t start, resource_size_t size)
{
	return arch_io_reserve_memtype_wc(start, size);
}

void pcieipc_inline_free_memtype_wc(resource_size_t start, resource_size_t size);
void pcieipc_inline_free_memtype_wc(resource_size_t start, resource_size_t size)
{
	arch_io_free_memtype_wc(start, size);
}

void __iomem *pcieipc_inline_ioremap_wc(phys_addr_t start, size_t size);
void __iomem *pcieipc_inline_ioremap_wc(phys_addr_t start, size_t size)
{
	return ioremap_wc(start, size);
}

void pcieipc_inline_iounmap(void __iomem *at);
void pcieipc_inline_iounmap(void __iomem *at)
{
	iounmap(at);
}

void pcieipc_inline_clear_io(void __iomem *at, size_t size);
void pcieipc_inline_clear_io(void __iomem *at, size_t size)
{
	memset_io(at, 0, size);
}

u32 pcieipc_inline_read_io(void __iomem *at);
u32 pcieipc_inline_read_io(void __iomem *at)
{
	return readl(at);
}

int pcieipc_inline_p2pdma_distance(struct pci_dev *provider, struct device *client);
int pcieipc_inline_p2pdma_distance(struct pci_dev *provider, struct device *client)
{
	return pci_p2pdma_distance(provider, client, false);
}

/* What is added to an address in a BAR for a peer below the same switch; for a device that is being probed. */
int pcieipc_inline_peer_offset(struct pci_dev *pdev, int bar, u64 *offset);
int pcieipc_inline_peer_offset(struct pci_dev *pdev, int bar, u64 *offset)
{
	struct p2pdma_provider *provider;
	int error = pcim_p2pdma_init(pdev);

	if (error && error != -EOPNOTSUPP)
		return error;
	provider = error ? NULL : pcim_p2pdma_provider(pdev, bar);
	*offset = provider ? provider->bus_offset : 0;
	return 0;
}

/* What lets others map a BAR, after the above; NULL where there is no peer traffic. */
void *pcieipc_inline_peer_provider(struct pci_dev *pdev, int bar);
void *pcieipc_inline_peer_provider(struct pci_dev *pdev, int bar)
{
#ifdef CONFIG_PCI_P2PDMA
	return rcu_access_pointer(pdev->p2pdma) ? pcim_p2pdma_provider(pdev, bar) : NULL;
#else
	return NULL;
#endif
}

void pcieipc_inline_wmb(void);
void pcieipc_inline_wmb(void)
{
	wmb();
}

/* Ten messages in five seconds. The module's own: the state of printk_ratelimit() is shared with the whole kernel. */
static DEFINE_RATELIMIT_STATE(messages, DEFAULT_RATELIMIT_INTERVAL, DEFAULT_RATELIMIT_BURST);

bool pcieipc_inline_ratelimit(void);
bool pcieipc_inline_ratelimit(void)
{
	return ___ratelimit(&messages, "pcieipc");
}

struct user_struct *pcieipc_inline_get_current_user(void);
struct user_struct *pcieipc_inline_get_current_user(void)
{
	return get_current_user();
}

unsigned long pcieipc_inline_memlock_limit(void);
unsigned long pcieipc_inline_memlock_limit(void)
{
	return rlimit(RLIMIT_MEMLOCK);
}

u64 pcieipc_inline_array_index_nospec(u64 index, u64 size);
u64 pcieipc_inline_array_index_nospec(u64 index, u64 size)
{
	return array_index_nospec(index, size);
}
