/* SPDX-License-Identifier: MIT */
/* Comparing both sides of a copy; see compare.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/error.h"
#include "base/pattern.h"
#include "interrupt.h"
#include "compare.h"

/* One side while it is read: the file where it is one, and the bytes at hand. */
struct reader {
	const struct compare_side *what;
	int fd;
	unsigned char *bytes;
};

/* With `stored`, what the page cache holds does not count: it may never have reached the store. */
static int reader_init(struct reader *reader, const struct compare_side *what, size_t chunk,
		       bool stored, struct pen_error *err)
{
	*reader = (struct reader){ .what = what, .fd = -1, .bytes = malloc(chunk) };
	if (!reader->bytes)
		return error_sys(err, -ENOMEM, "verify", what->side->name, -1);
	if (what->side->kind != SIDE_FILE)
		return 0;
	reader->fd = open(what->side->name, O_RDONLY | O_CLOEXEC);
	if (reader->fd < 0)
		return error_sys(err, -errno, "open for verifying", what->side->name, -1);
	if (stored)
		posix_fadvise(reader->fd, 0, 0, POSIX_FADV_DONTNEED);
	return 0;
}

static int read_file(struct reader *reader, uint64_t offset, size_t length, struct pen_error *err)
{
	size_t done = 0;

	while (done < length) {
		ssize_t got = pread(reader->fd, reader->bytes + done, length - done,
				    (off_t)(offset + done));

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return error_sys(err, -errno, "read for verifying",
					 reader->what->side->name, (int64_t)(offset + done));
		if (!got)
			return error_set(err, -EILSEQ, "verify", reader->what->side->name,
					 (int64_t)(offset + done), "the file ends here");
		done += (size_t)got;
	}
	return 0;
}

static int reader_take(struct reader *reader, uint64_t at, size_t length, struct pen_error *err)
{
	const struct compare_side *what = reader->what;

	switch (what->side->kind) {
	case SIDE_FILE:
		return read_file(reader, what->offset + at, length, err);
	case SIDE_MEMORY:
		return pen_device_get(what->device, reader->bytes, what->memory + at, length, err);
	case SIDE_PATTERN:
		pattern_fill(reader->bytes, length, what->offset + at);
		return 0;
	default:
		memset(reader->bytes, 0, length);
		return 0;
	}
}

static void reader_fini(struct reader *reader, bool drop)
{
	if (reader->fd >= 0) {
		if (drop)
			posix_fadvise(reader->fd, 0, 0, POSIX_FADV_DONTNEED);
		close(reader->fd);
	}
	free(reader->bytes);
}

static int compare(struct reader *from, struct reader *to, uint64_t at, size_t length,
		   struct pen_error *err)
{
	uint64_t first = to->what->offset + at;

	if (!memcmp(from->bytes, to->bytes, length))
		return 0;
	for (size_t i = 0; from->bytes[i] == to->bytes[i]; i++)
		first++;
	error_set(err, -EILSEQ, "verify", to->what->side->name, (int64_t)first,
		  "this byte differs from what %s holds", from->what->side->name);
	error_hint(err, "%s: something on the way changes data, or the source was replaced "
			"meanwhile; copy again, and check memory and disk",
		   to->what->side->kind == SIDE_MEMORY ? "The memory is wrong"
						       : "The new file is in place and wrong");
	return -EILSEQ;
}

int compare_sides(const struct compare_side *from, const struct compare_side *to, uint64_t length,
		  size_t chunk, bool drop, struct progress *progress, char hash[HASH_TEXT_SIZE],
		  struct pen_error *err)
{
	struct reader a, b = { .fd = -1 };
	struct hash *sum = hash_new();
	int rc = reader_init(&a, from, chunk, false, err);

	if (!rc)
		rc = reader_init(&b, to, chunk, true, err);
	if (!rc && !sum)
		rc = error_sys(err, -ENOMEM, "verify", to->side->name, -1);
	progress_start(progress, "verifying", length);
	for (uint64_t at = 0; !rc && at < length; at += chunk) {
		size_t piece = length - at < chunk ? (size_t)(length - at) : chunk;

		rc = reader_take(&a, at, piece, err);
		if (!rc)
			rc = reader_take(&b, at, piece, err);
		if (!rc)
			rc = compare(&a, &b, at, piece, err);
		if (!rc && interrupt_signal())
			rc = -ECANCELED;
		if (!rc)
			hash_add(sum, b.bytes, piece);
		progress_show(progress, at + piece);
	}
	progress_end(progress);
	if (!rc)
		hash_text(sum, hash);
	reader_fini(&a, drop);
	reader_fini(&b, drop);
	hash_free(sum);
	return rc;
}
