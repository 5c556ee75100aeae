/* SPDX-License-Identifier: MIT */
/* Is GPUDirect Storage real here: on this machine, and for a file; see gds.h. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/sysmacros.h>
#include "sys/cufile.h"
#include "sys/gds.h"
#include "sys/os.h"

/* Bits of cufile_facts()->stores. */
enum {
	STORE_LUSTRE = 0,
	STORE_WEKA = 1,
	STORE_NFS = 2,
	STORE_GPFS = 3,
	STORE_NVME = 4,
	STORE_NVMEOF = 5,
	STORE_SCSI = 6,
	STORE_BEEGFS = 9,
	STORE_VIRTIOFS = 13,
};

/* ----------------------------------------------------------------------- on this machine -- */

/* The first `size` bytes of a small file as a string; false where there is none. */
static bool read_small(const char *root, const char *path, char *text, size_t size)
{
	char full[512];
	FILE *file;
	size_t n = 0;

	snprintf(full, sizeof(full), "%s%s", root, path);
	file = fopen(full, "re");
	if (file) {
		n = fread(text, 1, size - 1, file);
		fclose(file);
	}
	text[n] = 0;
	return file != NULL;
}

static bool has_entries(const char *path)
{
	DIR *folder = opendir(path);
	struct dirent *entry;
	bool found = false;

	while (folder && !found && (entry = readdir(folder)))
		found = entry->d_name[0] != '.';
	if (folder)
		closedir(folder);
	return found;
}

/* The major number of the first word that looks like "580.159.03", or 0. */
static long version_in(const char *text)
{
	for (; *text; text++) {
		char *end;
		long major;

		if (!isdigit((unsigned char)*text))
			continue;
		major = strtol(text, &end, 10);
		if (*end == '.' && major >= 100)
			return major;
		/* Skip the whole word: "x86_64" is no version. */
		text += strcspn(text, " \t\n");
		if (!*text)
			break;
	}
	return 0;
}

/* Is "use_pci_p2pdma" true in the library's configuration, or in its environment? */
static bool p2pdma_configured(const char *root)
{
	const char *env = getenv("CUFILE_USE_PCIP2PDMA"), *path = getenv("CUFILE_ENV_PATH_JSON");
	char text[32768], *line, *rest = text;

	if (env)
		return !strcasecmp(env, "true") || !strcmp(env, "1");
	if (!read_small(path ? "" : root, path ? path : "/etc/cufile.json", text, sizeof(text)))
		return false;
	while ((line = strsep(&rest, "\n"))) {
		char *comment = strstr(line, "//"), *key;

		if (comment)
			*comment = 0;
		key = strstr(line, "\"use_pci_p2pdma\"");
		if (key) {
			key += strlen("\"use_pci_p2pdma\"");
			key += strspn(key, " \t:");
			return !strncmp(key, "true", 4);
		}
	}
	return false;
}

/* NVMe by PCI P2PDMA: why it cannot be, or NULL where it may. */
static const char *p2pdma_missing(const char *root)
{
	char text[512], path[512];
	int major = 0, minor = 0;

	read_small(root, "/proc/sys/kernel/osrelease", text, sizeof(text));
	if (sscanf(text, "%d.%d", &major, &minor) != 2 || major < 6 || (major == 6 && minor < 2))
		return "the kernel is older than 6.2";
	if (!read_small(root, "/proc/driver/nvidia/version", text, sizeof(text)))
		return "no NVIDIA driver is loaded";
	if (!strstr(text, "Open Kernel Module") || version_in(text) < 565)
		return "the NVIDIA driver is not the open one of version 565 or later";
	snprintf(path, sizeof(path), "%s/sys/class/nvme", root);
	if (!has_entries(path))
		return "there is no NVMe drive";
	if (read_small(root, "/sys/module/nvme_core/parameters/multipath", text, sizeof(text)) &&
	    text[0] == 'Y')
		return "NVMe multipath is on (nvme_core.multipath=N switches it off)";
	if (!p2pdma_configured(root))
		return "\"use_pci_p2pdma\" is not true in /etc/cufile.json";
	return NULL;
}

const char *gds_root = "";

int gds_evidence(const char *root, char *reason, size_t size)
{
	char path[512];
	const char *missing;

	snprintf(path, sizeof(path), "%s/proc/driver/nvidia-fs", root);
	if (has_entries(path)) {
		snprintf(reason, size, "nvidia-fs is loaded");
		return 0;
	}
	missing = p2pdma_missing(root);
	if (!missing) {
		snprintf(reason, size, "NVMe by PCI P2PDMA is configured");
		return 0;
	}
	snprintf(reason, size,
		 "nvidia-fs is not loaded (install nvidia-gds, modprobe nvidia-fs), and PCI P2PDMA "
		 "cannot be had: %s", missing);
	return -ENOTSUP;
}

/* ---------------------------------------------------------------------------- for a file -- */

enum block { BLOCK_OTHER, BLOCK_NVME, BLOCK_NVME_STRIPED, BLOCK_SCSI };

/* What a block device is made of, by its name in /sys; arrays are what their members are. */
static enum block block_kind(const char *folder, int depth)
{
	char path[512], real[4096];
	enum block kind = BLOCK_OTHER;
	struct dirent *entry;
	DIR *members;

	if (os_realpath(folder, real) < 0)
		return BLOCK_OTHER;
	if (strstr(real, "/nvme"))
		return BLOCK_NVME;
	if (strstr(real, "/block/sd"))
		return BLOCK_SCSI;
	snprintf(path, sizeof(path), "%s/slaves", folder);
	members = depth ? opendir(path) : NULL;
	while (members && (entry = readdir(members))) {
		char member[1024];

		if (entry->d_name[0] == '.')
			continue;
		snprintf(member, sizeof(member), "/sys/class/block/%s", entry->d_name);
		kind = block_kind(member, depth - 1);
		if (kind == BLOCK_NVME)
			kind = BLOCK_NVME_STRIPED;
		if (kind != BLOCK_NVME_STRIPED)
			break;
	}
	if (members)
		closedir(members);
	return kind;
}

static bool serves(int store)
{
	return cufile_facts()->stores >> store & 1;
}

static bool real_on_block(int fd, char *reason, size_t size)
{
	char folder[64];
	struct stat st;
	enum block kind;

	if (os_fstat(fd, &st) < 0) {
		snprintf(reason, size, "the file's device cannot be found out");
		return false;
	}
	snprintf(folder, sizeof(folder), "/sys/dev/block/%u:%u", major(st.st_dev),
		 minor(st.st_dev));
	kind = block_kind(folder, 3);
	if (((kind == BLOCK_NVME || kind == BLOCK_NVME_STRIPED) &&
	     (serves(STORE_NVME) || serves(STORE_NVMEOF))) ||
	    (kind == BLOCK_NVME && cufile_facts()->p2pdma) ||
	    (kind == BLOCK_SCSI && serves(STORE_SCSI)))
		return true;
	snprintf(reason, size, "cuFile would run in compatibility mode: %s",
		 kind == BLOCK_OTHER ? "the file is not on NVMe" :
				       "its drivers do not serve this kind of drive");
	return false;
}

bool gds_assume_real;

bool gds_real(int fd, char *reason, size_t size)
{
	static const struct {
		const char *name;
		int store;
	} networks[] = {
		{ "nfs", STORE_NFS },	    { "lustre", STORE_LUSTRE }, { "gpfs", STORE_GPFS },
		{ "beegfs", STORE_BEEGFS }, { "virtiofs", STORE_VIRTIOFS },
		{ "0x18031977", STORE_WEKA },
	};
	char name[32] = "this file system";

	if (gds_assume_real)
		return true;
	if (!cufile_facts()->stores && !cufile_facts()->p2pdma) {
		snprintf(reason, size, "cuFile would run in compatibility mode: it finds neither "
			 "nvidia-fs nor PCI P2PDMA");
		return false;
	}
	if (os_filesystem(fd, name, sizeof(name)) >= 0) {
		if (!strcmp(name, "ext4") || !strcmp(name, "xfs"))
			return real_on_block(fd, reason, size);
		for (size_t i = 0; i < sizeof(networks) / sizeof(networks[0]); i++)
			if (!strcmp(name, networks[i].name) && serves(networks[i].store))
				return true;
	}
	snprintf(reason, size, "cuFile would run in compatibility mode: it does not serve %s here",
		 name);
	return false;
}
