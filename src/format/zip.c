/* SPDX-License-Identifier: MIT */
/*
 * Reading and writing what is around the records of a zip file; see zip.h. All numbers are little
 * endian. Sizes and offsets have 32 bits; those that need more are all ones there, and stand in
 * full in an extra field (zip64) or, for the directory's own, in a second end record.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"
#include "format/words.h"
#include "format/zip.h"
#include "sys/os.h"

#define DAMAGED "The file is damaged or was not written by torch: copy or save it again"
#define CUT_SHORT "The file may be cut short: copy or download it again"

#define SIGN_LOCAL 0x04034b50u
#define SIGN_ENTRY 0x02014b50u
#define SIGN_END 0x06054b50u
#define SIGN_END64 0x06064b50u
#define SIGN_LOCATOR 0x07064b50u

#define ENTRY 46u
#define END 22u
#define END64 56u
#define LOCATOR 20u

#define FLAG_ENCRYPTED 0x2041u	/* any way of it */
#define FLAG_DESCRIPTOR 0x0008u	/* sizes and CRC32 follow the bytes; a local header may lack them */
#define FLAG_PATCH 0x0020u
#define FLAG_UTF8 0x0800u

#define EXTRA_ZIP64 1u
#define EXTRA_PADDING 0x4246u	/* "FB", torch's own */
#define ALL_16 0xffffu
#define ALL_32 0xffffffffu

uint64_t zip_get(const unsigned char *from, unsigned int size)
{
	uint64_t value = 0;

	for (unsigned int i = size; i > 0; i--)
		value = value << 8 | from[i - 1];
	return value;
}

unsigned char *zip_put(unsigned char *to, uint64_t value, unsigned int size)
{
	for (unsigned int i = 0; i < size; i++)
		to[i] = (unsigned char)(value >> (8 * i));
	return to + size;
}

/* ------------------------------------------------------------------------------- the end -- */

static int bad_end(const char *name, uint64_t at, const char *what, const char *hint,
		   struct pen_error *err)
{
	int rc = words_bad(err, name, (int64_t)at, "%s", what);

	error_hint(err, "%s", hint);
	return rc;
}

/* The larger end record, which stands before its locator; they must agree with the small one. */
static int read_end64(const char *name, const unsigned char *tail, size_t length,
		      uint64_t file_size, struct zip_end *end, struct pen_error *err)
{
	const unsigned char *small = tail + length - END, *locator = small - LOCATOR;
	const unsigned char *large = locator - END64;
	uint64_t at = file_size - END - LOCATOR - END64;

	if (length < END + LOCATOR + END64 || zip_get(large, 4) != SIGN_END64 ||
	    zip_get(large + 4, 8) != END64 - 12 || zip_get(locator + 8, 8) != at ||
	    zip_get(locator + 4, 4) || zip_get(locator + 16, 4) != 1)
		return bad_end(name, file_size - END - LOCATOR,
			       "the zip's end points to an end record that is not there", DAMAGED,
			       err);
	end->count = zip_get(large + 32, 8);
	end->length = zip_get(large + 40, 8);
	end->directory = zip_get(large + 48, 8);
	if (zip_get(large + 16, 8) || zip_get(large + 24, 8) != end->count ||
	    (zip_get(small + 10, 2) != ALL_16 && zip_get(small + 10, 2) != end->count) ||
	    (zip_get(small + 12, 4) != ALL_32 && zip_get(small + 12, 4) != end->length) ||
	    (zip_get(small + 16, 4) != ALL_32 && zip_get(small + 16, 4) != end->directory))
		return bad_end(name, at, "the zip's two ends contradict each other", DAMAGED, err);
	if (end->directory > at || at - end->directory != end->length)
		return bad_end(name, at, "the zip's directory does not end where the end begins",
			       DAMAGED, err);
	return 0;
}

int zip_find_end(const char *name, const void *tail, size_t length, uint64_t file_size,
		 struct zip_end *end, struct pen_error *err)
{
	const unsigned char *bytes = tail, *small;
	uint64_t at = file_size - END;
	int rc = 0;

	if (length < END)
		return bad_end(name, 0, "it is too short for a zip file", CUT_SHORT, err);
	small = bytes + length - END;
	if (zip_get(small, 4) != SIGN_END || zip_get(small + 20, 2))
		return bad_end(name, at, "it does not end as a zip file of torch's ends", CUT_SHORT,
			       err);
	end->count = zip_get(small + 10, 2);
	end->length = zip_get(small + 12, 4);
	end->directory = zip_get(small + 16, 4);
	if (zip_get(small + 4, 4) || zip_get(small + 8, 2) != end->count)
		return bad_end(name, at, "it is one part of a zip file of several", DAMAGED, err);
	if (length >= END + LOCATOR && zip_get(small - LOCATOR, 4) == SIGN_LOCATOR)
		rc = read_end64(name, bytes, length, file_size, end, err);
	else if (end->directory > at || at - end->directory != end->length)
		rc = bad_end(name, at, "the zip's directory does not end where the end begins",
			     DAMAGED, err);
	if (rc)
		return rc;
	if (end->count > end->length / ENTRY)
		return bad_end(name, at, "the zip's directory is too short for its records",
			       DAMAGED, err);
	if (!end->count)
		return bad_end(name, at, "the zip has no records", DAMAGED, err);
	if (end->length > ZIP_DIRECTORY_MAX)
		return bad_end(name, at, "the zip's directory is larger than 256 MiB",
			       "No file of torch's is like that", err);
	return 0;
}

/* ------------------------------------------------------------------------- the directory -- */

/* What is wrong with a record, by its name. */
static int bad_record(const char *name, uint64_t at, const struct zip_entry *entry,
		      const char *what, struct pen_error *err)
{
	char shown[WORDS_NAME];
	int rc = words_bad(err, name, (int64_t)at, "record %s %s",
			   words_text(shown, entry->name, entry->name_length), what);

	error_hint(err, "%s", DAMAGED);
	return rc;
}

/*
 * Numbers that did not fit: each of `wanted`, in their order, in the zip64 field. Every field must
 * end where the next begins, and there is one of that kind at most.
 */
static bool take_wide(const unsigned char *extra, size_t length, uint64_t **wanted, size_t count)
{
	bool found = false;

	while (length >= 4) {
		size_t kind = zip_get(extra, 2), size = zip_get(extra + 2, 2);

		if (size > length - 4 || (kind == EXTRA_ZIP64 && (found || size < 8 * count)))
			return false;
		for (size_t i = 0; kind == EXTRA_ZIP64 && i < count; i++)
			*wanted[i] = zip_get(extra + 4 + 8 * i, 8);
		found |= kind == EXTRA_ZIP64;
		extra += 4 + size;
		length -= 4 + size;
	}
	return !length && (found || !count);
}

static int read_entry(const char *name, const unsigned char *from, uint64_t at, size_t left,
		      const struct zip_end *end, struct zip_entry *entry, char **texts,
		      size_t *used, struct pen_error *err)
{
	size_t extra, comment, wide_count = 0;
	uint64_t *wide[3];

	if (left < ENTRY || zip_get(from, 4) != SIGN_ENTRY)
		return bad_end(name, at, "the zip's directory has no record here", DAMAGED, err);
	entry->name_length = zip_get(from + 28, 2);
	extra = zip_get(from + 30, 2);
	comment = zip_get(from + 32, 2);
	*used = ENTRY + entry->name_length + extra + comment;
	if (*used > left)
		return bad_end(name, at, "a record of the zip's directory leaves it", DAMAGED, err);
	entry->name = memcpy(*texts, from + ENTRY, entry->name_length);
	(*texts)[entry->name_length] = 0;
	*texts += entry->name_length + 1;
	entry->flags = (uint16_t)zip_get(from + 8, 2);
	entry->method = (uint16_t)zip_get(from + 10, 2);
	entry->crc32 = (uint32_t)zip_get(from + 16, 4);
	entry->bytes = zip_get(from + 20, 4);
	entry->unpacked = zip_get(from + 24, 4);
	entry->header = zip_get(from + 42, 4);
	if (entry->unpacked == ALL_32)
		wide[wide_count++] = &entry->unpacked;
	if (entry->bytes == ALL_32)
		wide[wide_count++] = &entry->bytes;
	if (entry->header == ALL_32)
		wide[wide_count++] = &entry->header;
	if (!entry->name_length || memchr(entry->name, 0, entry->name_length))
		return bad_record(name, at, entry, "has a name that is none", err);
	if (!take_wide(from + ENTRY + entry->name_length, extra, wide, wide_count))
		return bad_record(name, at, entry, "has no sizes (its extra field is wrong)", err);
	if (zip_get(from + 34, 2) || entry->flags & (FLAG_ENCRYPTED | FLAG_PATCH))
		return bad_record(name, at, entry, "is encrypted or in another file", err);
	if (!entry->method && entry->bytes != entry->unpacked)
		return bad_record(name, at, entry, "is stored, but has two sizes", err);
	if (entry->header >= end->directory || end->directory - entry->header < ZIP_LOCAL ||
	    entry->bytes > end->directory - entry->header - ZIP_LOCAL)
		return bad_record(name, at, entry, "does not lie before the directory", err);
	return 0;
}

static int by_header(const void *left, const void *right)
{
	const struct zip_entry *a = left, *b = right;

	return a->header < b->header ? -1 : a->header > b->header;
}

static int by_name(const void *left, const void *right)
{
	const struct zip_entry *a = *(struct zip_entry *const *)left;
	const struct zip_entry *b = *(struct zip_entry *const *)right;

	return text_order(a->name, a->name_length, b->name, b->name_length);
}

static int check_names(const char *name, const struct zip *zip, struct pen_error *err)
{
	const struct zip_entry **sorted = os_calloc(zip->count, sizeof(sorted[0]));
	int rc = 0;

	if (!sorted)
		return error_sys(err, -ENOMEM, "open", name, -1);
	for (size_t i = 0; i < zip->count; i++)
		sorted[i] = &zip->entries[i];
	qsort(sorted, zip->count, sizeof(sorted[0]), by_name);
	for (size_t i = 1; !rc && i < zip->count; i++)
		if (!by_name(&sorted[i - 1], &sorted[i]))
			rc = bad_record(name, sorted[i]->header, sorted[i], "is there twice", err);
	free(sorted);
	return rc;
}

/* That local headers do not overlap is known here; that bytes do not, with zip_check_local(). */
static int check_places(const char *name, const struct zip *zip, struct pen_error *err)
{
	if (zip->entries[0].header)
		return bad_end(name, 0, "it does not begin with a record of the zip", DAMAGED, err);
	for (size_t i = 1; i < zip->count; i++)
		if (zip->entries[i].header == zip->entries[i - 1].header)
			return bad_record(name, zip->entries[i].header, &zip->entries[i],
					  "lies where another one lies", err);
	return 0;
}

static int read_entries(const char *name, const unsigned char *directory,
			const struct zip_end *end, struct zip *zip, char *texts,
			struct pen_error *err)
{
	uint64_t first;
	size_t at = 0;

	for (size_t i = 0; i < zip->count; i++) {
		size_t used = 0;
		int rc = read_entry(name, directory + at, end->directory + at,
				    (size_t)end->length - at, end, &zip->entries[i], &texts, &used,
				    err);

		if (rc)
			return rc;
		at += used;
	}
	if (at != end->length)
		return bad_end(name, end->directory + at,
			       "the zip's directory has more than its records", DAMAGED, err);
	first = zip->entries[0].header;
	qsort(zip->entries, zip->count, sizeof(zip->entries[0]), by_header);
	while (zip->entries[zip->first].header != first)
		zip->first++;
	return 0;
}

int zip_parse(const char *name, const void *directory, const struct zip_end *end,
	      struct zip **zip, struct pen_error *err)
{
	/* Names with their NULs are shorter than the directory that they stand in. */
	size_t tables = sizeof(**zip) + (size_t)end->count * sizeof((*zip)->entries[0]);
	struct zip *new = os_calloc(1, tables + (size_t)end->length);
	int rc;

	*zip = NULL;
	if (!new)
		return error_sys(err, -ENOMEM, "open", name, -1);
	new->entries = (struct zip_entry *)(new + 1);
	new->count = (size_t)end->count;
	new->directory = end->directory;
	rc = read_entries(name, directory, end, new, (char *)new + tables, err);
	if (!rc)
		rc = check_places(name, new, err);
	if (!rc)
		rc = check_names(name, new, err);
	if (rc)
		free(new);
	else
		*zip = new;
	return rc;
}

/* -------------------------------------------------------------------------- local headers -- */

size_t zip_local_length(const struct zip *zip, size_t i)
{
	const struct zip_entry *entry = &zip->entries[i];
	uint64_t wanted = ZIP_LOCAL + entry->name_length + ZIP_LOCAL_SIZES;
	uint64_t there = zip->directory - entry->header;

	return (size_t)(wanted < there ? wanted : there);
}

/* Sizes and CRC32 of a local header: the directory's, or left to the descriptor. */
static bool local_sizes_agree(const struct zip_entry *entry, const unsigned char *local,
			      const unsigned char *extra, size_t extra_seen)
{
	uint64_t crc32 = zip_get(local + 14, 4), bytes = zip_get(local + 18, 4);
	uint64_t unpacked = zip_get(local + 22, 4);

	if (entry->flags & FLAG_DESCRIPTOR && !crc32 && !bytes && !unpacked)
		return true;
	if (bytes == ALL_32 || unpacked == ALL_32) {
		/* In a local header both are in the field, and it is the first one. */
		if (bytes != unpacked || extra_seen < ZIP_LOCAL_SIZES ||
		    zip_get(extra, 2) != EXTRA_ZIP64 || zip_get(extra + 2, 2) != 16)
			return false;
		unpacked = zip_get(extra + 4, 8);
		bytes = zip_get(extra + 12, 8);
		/* A writer that did not know the size yet has said so by 0. */
		if (entry->flags & FLAG_DESCRIPTOR && !crc32 && !bytes && !unpacked)
			return true;
	}
	return crc32 == entry->crc32 && bytes == entry->bytes && unpacked == entry->unpacked;
}

int zip_check_local(const char *name, struct zip *zip, size_t i, const void *bytes,
		    struct pen_error *err)
{
	struct zip_entry *entry = &zip->entries[i];
	uint64_t end = i + 1 < zip->count ? zip->entries[i + 1].header : zip->directory;
	size_t seen = zip_local_length(zip, i), extra;
	const unsigned char *local = bytes;

	if (seen < ZIP_LOCAL + entry->name_length || zip_get(local, 4) != SIGN_LOCAL)
		return bad_record(name, entry->header, entry, "has no header of its own", err);
	if (zip_get(local + 6, 2) != entry->flags || zip_get(local + 8, 2) != entry->method ||
	    zip_get(local + 26, 2) != entry->name_length ||
	    memcmp(local + ZIP_LOCAL, entry->name, entry->name_length))
		return bad_record(name, entry->header, entry, "has the header of another", err);
	extra = zip_get(local + 28, 2);
	seen -= ZIP_LOCAL + entry->name_length;
	if (!local_sizes_agree(entry, local, local + ZIP_LOCAL + entry->name_length,
			       seen < extra ? seen : extra))
		return bad_record(name, entry->header, entry, "has another size in its header",
				  err);
	/* The header begins before the directory, so that nothing here can overflow. */
	entry->offset = entry->header + ZIP_LOCAL + entry->name_length + extra;
	if (entry->offset > end || entry->bytes > end - entry->offset)
		return bad_record(name, entry->header, entry, "reaches into what follows it", err);
	return 0;
}

/* --------------------------------------------------------------------------------- writing -- */

static uint64_t at_most(uint64_t value, uint64_t most)
{
	return value < most ? value : most;
}

/* What local header and directory have in common, from the version on. */
static unsigned char *put_common(unsigned char *to, const struct zip_entry *entry, size_t extra)
{
	to = zip_put(to, 45, 2);	/* the version that knows zip64 */
	to = zip_put(to, FLAG_UTF8, 2);
	to = zip_put(to, 0, 2);
	to = zip_put(to, 0x00210000, 4);	/* the first day that zip knows */
	to = zip_put(to, entry->crc32, 4);
	to = zip_put(to, at_most(entry->bytes, ALL_32), 4);
	to = zip_put(to, at_most(entry->bytes, ALL_32), 4);
	to = zip_put(to, entry->name_length, 2);
	return zip_put(to, extra, 2);
}

static unsigned char *put_bytes(unsigned char *to, const void *from, size_t length)
{
	return (unsigned char *)memcpy(to, from, length) + length;
}

size_t zip_put_local(unsigned char *to, const struct zip_entry *entry)
{
	size_t wide = entry->bytes >= ALL_32 ? 20 : 0, least = ZIP_LOCAL + entry->name_length;
	uint64_t extra = entry->offset - entry->header - least;
	unsigned char *at = zip_put(to, SIGN_LOCAL, 4);

	if (entry->offset - entry->header < least + wide + 4 || extra > ALL_16)
		return 0;
	at = put_common(at, entry, (size_t)extra);
	at = put_bytes(at, entry->name, entry->name_length);
	if (wide) {
		at = zip_put(at, EXTRA_ZIP64, 2);
		at = zip_put(at, 16, 2);
		at = zip_put(at, entry->bytes, 8);
		at = zip_put(at, entry->bytes, 8);
	}
	at = zip_put(at, EXTRA_PADDING, 2);
	at = zip_put(at, extra - wide - 4, 2);
	return (size_t)(at - to);
}

size_t zip_put_entry(unsigned char *to, const struct zip_entry *entry)
{
	size_t wide = (entry->bytes >= ALL_32 ? 16 : 0) + (entry->header >= ALL_32 ? 8 : 0);
	unsigned char *at = zip_put(to, SIGN_ENTRY, 4);

	at = zip_put(at, 45, 2);
	at = put_common(at, entry, wide ? wide + 4 : 0);
	at = zip_put(at, 0, 2);	/* comment, disk, attributes */
	at = zip_put(at, 0, 4);
	at = zip_put(at, 0, 4);
	at = zip_put(at, at_most(entry->header, ALL_32), 4);
	at = put_bytes(at, entry->name, entry->name_length);
	if (wide) {
		at = zip_put(at, EXTRA_ZIP64, 2);
		at = zip_put(at, wide, 2);
	}
	if (entry->bytes >= ALL_32) {
		at = zip_put(at, entry->bytes, 8);
		at = zip_put(at, entry->bytes, 8);
	}
	if (entry->header >= ALL_32)
		at = zip_put(at, entry->header, 8);
	return (size_t)(at - to);
}

size_t zip_put_end(unsigned char *to, const struct zip_end *end)
{
	unsigned char *at = zip_put(to, SIGN_END64, 4);

	at = zip_put(at, END64 - 12, 8);
	at = zip_put(at, 45, 2);
	at = zip_put(at, 45, 2);
	at = zip_put(at, 0, 8);
	at = zip_put(at, end->count, 8);
	at = zip_put(at, end->count, 8);
	at = zip_put(at, end->length, 8);
	at = zip_put(at, end->directory, 8);
	at = zip_put(at, SIGN_LOCATOR, 4);
	at = zip_put(at, 0, 4);
	at = zip_put(at, end->directory + end->length, 8);
	at = zip_put(at, 1, 4);
	at = zip_put(at, SIGN_END, 4);
	at = zip_put(at, 0, 4);
	at = zip_put(at, at_most(end->count, ALL_16), 2);
	at = zip_put(at, at_most(end->count, ALL_16), 2);
	at = zip_put(at, at_most(end->length, ALL_32), 4);
	at = zip_put(at, at_most(end->directory, ALL_32), 4);
	at = zip_put(at, 0, 2);
	return (size_t)(at - to);
}
