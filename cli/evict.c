/* SPDX-License-Identifier: MIT */
/* Cold files; see evict.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include "base/error.h"
#include "base/text.h"
#include "evict.h"

/* How much of a file is in the page cache, as the engine sees it. */
static uint64_t resident(struct pen_object *object)
{
	struct pen_explanation *plan;
	struct pen_device *host;
	uint64_t bytes = 0;

	if (pen_device_open("host", &host, NULL))
		return 0;
	if (!pen_explain(object, host, NULL, &plan, NULL)) {
		bytes = plan->resident;
		pen_explain_free(plan);
	}
	pen_device_close(host);
	return bytes;
}

int evict(const char *path, struct pen_object *object, uint64_t *kept, struct pen_error *err)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return error_sys(err, -errno, "open to evict", path, -1);
	/* Pages that are not yet on the store stay where they are, so they are sent there first. */
	fdatasync(fd);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
	*kept += resident(object);
	return 0;
}

void evict_print_kept(uint64_t kept)
{
	char size[TEXT_SIZE_MAX];

	if (kept)
		printf("  not cold: %s stayed in the page cache: the file system keeps its files "
		       "there, or somebody has them mapped\n",
		       text_from_size(kept, size, sizeof(size)));
}
