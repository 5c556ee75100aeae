/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_ZIP_H
#define FORMAT_ZIP_H
/*
 * A zip file, as far as torch's files need one: records one after the other, each behind a local
 * header; a directory of all of them at the end; behind it one or three small end records. Pure
 * functions over bytes, no I/O. Two readers of one zip can see different files where the parts of
 * it disagree; what disagrees is refused, so that there is only one way to read what is accepted:
 *
 *   1. The end is the file's end, the directory ends where the end begins, a record is at byte 0.
 *   2. Every record lies whole before the directory, and shares no byte with another.
 *   3. Local headers say what the directory says. Names are unique, without a NUL.
 *   4. Records that are stored have the size that is told; no record is encrypted.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

/* Little endian numbers of `size` bytes; put returns the place after it. */
uint64_t zip_get(const unsigned char *from, unsigned int size);
unsigned char *zip_put(unsigned char *to, uint64_t value, unsigned int size);

#define ZIP_TAIL 98u		/* the end records, at most */
#define ZIP_DIRECTORY_MAX (256u << 20)
#define ZIP_LOCAL 30u		/* a local header without name and extra field */
#define ZIP_LOCAL_SIZES 20u	/* what of the extra field zip_check_local() wants to see */
#define ZIP_NAME_MAX 65535u

struct zip_entry {
	const char *name;	/* with a NUL after its end */
	size_t name_length;
	uint64_t header;	/* where its local header begins */
	uint64_t offset;	/* where its bytes begin; set by zip_check_local() */
	uint64_t bytes;		/* in the file */
	uint64_t unpacked;	/* the same where it is stored */
	uint32_t crc32;
	uint16_t method;	/* 0: stored */
	uint16_t flags;		/* as the file has them */
};

struct zip {
	struct zip_entry *entries;	/* by `header` */
	size_t count;
	size_t first;			/* which one the directory has first */
	uint64_t directory;		/* where it begins */
};

/* Where the directory lies, and how many records it has. */
struct zip_end {
	uint64_t directory, length, count;
};

/* From the last bytes of a file, ZIP_TAIL of them or all. `name` is for messages. */
int zip_find_end(const char *name, const void *tail, size_t length, uint64_t file_size,
		 struct zip_end *end, struct pen_error *err);

/* The records, from the directory's bytes; `offset` is not known yet. Free it with free(). */
int zip_parse(const char *name, const void *directory, const struct zip_end *end,
	      struct zip **zip, struct pen_error *err);

/* How many bytes of record `i` zip_check_local() wants to see, from its header on. */
size_t zip_local_length(const struct zip *zip, size_t i);

/* Check a local header against the directory and the neighbour, and learn where the bytes are. */
int zip_check_local(const char *name, struct zip *zip, size_t i, const void *bytes,
		    struct pen_error *err);

/* --------------------------------------------------------------------------------- writing -- */

/* Most that a local header takes without its padding; what the directory has of one record; the
 * end records. */
#define ZIP_PUT_LOCAL(name_length) (ZIP_LOCAL + (name_length) + 24u)
#define ZIP_PUT_ENTRY(name_length) (46u + (name_length) + 28u)
#define ZIP_PUT_END 98u

/*
 * Write the local header of a stored record whose bytes begin at entry->offset, so that it ends
 * there: its extra field ends in padding, which is not written. Returns how much is; 0: there is
 * no room for it between header and bytes, or more than an extra field can fill.
 */
size_t zip_put_local(unsigned char *to, const struct zip_entry *entry);

/* An entry of the directory; the end of the file. They return how much they wrote. */
size_t zip_put_entry(unsigned char *to, const struct zip_entry *entry);
size_t zip_put_end(unsigned char *to, const struct zip_end *end);

#endif
