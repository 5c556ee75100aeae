/* SPDX-License-Identifier: MIT */
/*
 * Reading checkpoints of torch.distributed.checkpoint without the pickle that says where things
 * are. Names of files are found in it as the bytes that they are. Zips are found from the end of a
 * file: each ends in a record that says how long its parts are, so where it begins, which is where
 * the one before it ends.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/error.h"
#include "base/text.h"
#include "dcp.h"
#include "report.h"

#define SUFFIX ".distcp"
#define METADATA ".metadata"
#define METADATA_MOST (1 << 30)
#define NAME_MOST 64		/* "__RANK_NUMBER.distcp" */
#define END 22			/* of a zip: its last record; before it may be two more */
#define LOCATOR 20
#define END64 56
#define GAP 64			/* Penstock begins zips at multiples of it, torch has no gaps */

static uint64_t number(const unsigned char *from, int size)
{
	uint64_t value = 0;

	while (size--)
		value = value << 8 | from[size];
	return value;
}

/* ------------------------------------------------------------------------------ .metadata -- */

/* All of it, with a NUL behind; NULL: there is none. */
static char *metadata_read(const char *folder, size_t *length)
{
	char path[PATH_MAX], *bytes = NULL;
	struct stat info;
	int fd = -1;

	if (snprintf(path, sizeof(path), "%s/" METADATA, folder) < (int)sizeof(path))
		fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	if (!fstat(fd, &info) && S_ISREG(info.st_mode) && info.st_size < METADATA_MOST)
		bytes = calloc(1, (size_t)info.st_size + 1);
	*length = bytes ? (size_t)info.st_size : 0;
	if (bytes && pread(fd, bytes, *length, 0) != info.st_size) {
		free(bytes);
		bytes = NULL;
	}
	close(fd);
	return bytes;
}

/* The next name of a file from `at` on: where it begins and, in `at`, ends. */
static const char *name_next(const char **at, const char *end)
{
	const char *dot;

	while ((dot = memmem(*at, (size_t)(end - *at), SUFFIX, strlen(SUFFIX)))) {
		const char *from = dot;

		while (from > *at && (isdigit((unsigned char)from[-1]) || from[-1] == '_'))
			from--;
		*at = dot + strlen(SUFFIX);
		if (from < dot && *at - from < NAME_MOST)
			return from;
	}
	return NULL;
}

bool dcp_is(const char *path)
{
	const char *at;
	size_t length;
	char *bytes;
	bool is;

	if (text_ends_with(path, SUFFIX))
		return true;
	bytes = metadata_read(path, &length);
	at = bytes;
	is = bytes && name_next(&at, bytes + length);
	free(bytes);
	return is;
}

/* --------------------------------------------------------------------------------- a file -- */

/* Where the zip begins that ends in the last bytes before `end`, which becomes its end; -1: none
 * does. Whether it is one, who opens it sees. */
static int64_t zip_begin(int fd, uint64_t *end)
{
	unsigned char bytes[GAP + END64 + LOCATOR + END];
	size_t length = *end < sizeof(bytes) ? (size_t)*end : sizeof(bytes);

	if (pread(fd, bytes, length, (off_t)(*end - length)) != (ssize_t)length)
		return -1;
	for (size_t gap = 0; gap < GAP && length >= END + gap; gap++) {
		const unsigned char *small = bytes + length - gap - END;
		uint64_t parts = number(small + 12, 4), offset = number(small + 16, 4);
		uint64_t tail = END, left = *end - gap;

		if (memcmp(small, "PK\5\6", 4) || number(small + 20, 2))
			continue;
		if (small - bytes >= LOCATOR + END64 && !memcmp(small - LOCATOR, "PK\6\7", 4)) {
			parts = number(small - LOCATOR - END64 + 40, 8);
			offset = number(small - LOCATOR - END64 + 48, 8);
			tail = END64 + LOCATOR + END;
		}
		if (tail > left || parts > left - tail || offset > left - tail - parts)
			return -1;
		*end = left;
		return (int64_t)(left - tail - parts - offset);
	}
	return -1;
}

static int add_item(struct pen_object *object, uint64_t offset, uint64_t length, bool verify,
		    struct dcp *dcp, struct pen_error *err)
{
	struct pen_torch_checked sums = PEN_TORCH_CHECKED_INIT;
	struct pen_torch *item;
	int rc = pen_torch_open_item(object, offset, length, &item, err);

	if (rc)
		return rc;
	sums.by = pen_torch_verifiable(item);
	if (verify)
		rc = pen_torch_verify(item, NULL, &sums, err);
	pen_torch_close(item);
	dcp->sums.verified += sums.verified;
	dcp->sums.unverified += sums.unverified;
	if (!dcp->objects++ || sums.by < dcp->sums.by)
		dcp->sums.by = sums.by;
	return rc;
}

/*
 * Nothing that ends here can be read. Values that a planner of the program's own has written need
 * not be zips, nor what went through an extension of torch's: a file that does not begin with a
 * zip has such at its beginning, of which nothing can be said.
 */
static int no_zip(const char *path, int fd, uint64_t end, uint64_t size, struct dcp *dcp,
		  struct pen_error *err)
{
	char first[4];
	bool foreign = pread(fd, first, 4, 0) == 4 && memcmp(first, "PK\3\4", 4);

	if (foreign && end < size) {
		dcp->sums.unverified += end;
		return 0;
	}
	if (foreign) {
		error_set(err, -ENOTSUP, "read", path, -1,
			  "it neither begins nor ends with an object as torch.save writes it");
		error_hint(err, "If it went through an extension, only a load can check it; "
			   "otherwise take another copy of it");
		return -ENOTSUP;
	}
	error_set(err, -EBADMSG, "read", path, (int64_t)end, end < size ?
		  "no object of torch's ends before this byte, where another begins" :
		  "it does not end as a file of torch.distributed.checkpoint ends");
	error_hint(err, end < size ? "The file is damaged: take another copy of it" :
		   "The file may be cut short: take another copy of it");
	return -EBADMSG;
}

static int read_objects(const char *path, int fd, struct pen_object *object, bool verify,
			struct dcp *dcp, struct pen_error *err)
{
	uint64_t size = pen_object_size(object), end = size;
	int rc;

	do {
		int64_t begin = zip_begin(fd, &end);

		if (begin < 0)
			return no_zip(path, fd, end, size, dcp, err);
		rc = add_item(object, (uint64_t)begin, end - (uint64_t)begin, verify, dcp, err);
		end = (uint64_t)begin;
	} while (!rc && end);
	return rc;
}

static int read_file(const char *path, bool verify, struct dcp *dcp, struct pen_error *err)
{
	const char *slash = strrchr(path, '/');
	uint64_t before = dcp->objects;
	struct pen_object *object;
	int fd, rc = pen_object_open(path, PEN_READ, 0, &object, err);
	json_t *file;

	if (rc)
		return rc;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	rc = fd < 0 ? error_sys(err, -errno, "open", path, -1) :
		      read_objects(path, fd, object, verify, dcp, err);
	if (fd >= 0)
		close(fd);
	file = json_object();
	json_object_set_new(file, "name", report_text(slash ? slash + 1 : path));
	json_object_set_new(file, "bytes", report_number(pen_object_size(object)));
	json_object_set_new(file, "objects", report_number(dcp->objects - before));
	json_array_append_new(dcp->files, file);
	dcp->file_count++;
	dcp->bytes += pen_object_size(object);
	pen_object_close(object);
	return rc;
}

/* ------------------------------------------------------------------------------ all of it -- */

static bool has_file(const struct dcp *dcp, const char *name)
{
	for (size_t i = 0; i < json_array_size(dcp->files); i++) {
		const json_t *file = json_array_get(dcp->files, i);

		if (!strcmp(json_string_value(json_object_get(file, "name")), name))
			return true;
	}
	return false;
}

/* A pickle has a name once, as a rule, and refers to it from then on. */
static int read_folder(const char *folder, bool verify, struct dcp *dcp, struct pen_error *err)
{
	const char *at, *from;
	char path[PATH_MAX], name[NAME_MOST];
	size_t length;
	char *bytes = metadata_read(folder, &length);
	int rc = 0;

	at = bytes;
	while (!rc && at && (from = name_next(&at, bytes + length))) {
		snprintf(name, sizeof(name), "%.*s", (int)(at - from), from);
		if (has_file(dcp, name))
			continue;
		if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path))
			rc = error_sys(err, -ENAMETOOLONG, "open", folder, -1);
		else
			rc = read_file(path, verify, dcp, err);
		if (rc == -ENOENT) {
			error_set(err, rc, "open", path, -1,
				  "there is no such file, but " METADATA " names it");
			error_hint(err, "Copy the folder again, with all that is in it");
		}
	}
	free(bytes);
	return rc;
}

int dcp_read(const char *path, bool verify, struct dcp *dcp, struct pen_error *err)
{
	*dcp = (struct dcp){ .files = json_array() };
	if (text_ends_with(path, SUFFIX))
		return read_file(path, verify, dcp, err);
	return read_folder(path, verify, dcp, err);
}

void dcp_free(struct dcp *dcp)
{
	json_decref(dcp->files);
}

void dcp_print(const struct dcp *dcp)
{
	char size[REPORT_BYTES_MAX];

	printf("  torch.distributed.checkpoint: %llu %s in %zu %s, %s; their names are in\n"
	       "  " METADATA ", which has no sums and is read by torch alone\n",
	       (unsigned long long)dcp->objects, dcp->objects == 1 ? "object" : "objects",
	       dcp->file_count, dcp->file_count == 1 ? "file" : "files",
	       report_bytes(dcp->bytes, size, sizeof(size)));
}
