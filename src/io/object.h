/* SPDX-License-Identifier: MIT */
#ifndef IO_OBJECT_H
#define IO_OBJECT_H
/*
 * An object is where bytes rest. This is the control path: opening, what the store wants, what of
 * it is cached, small reads, commit. Bytes in bulk travel through queues (queue.h).
 *
 * Invariants
 *   1. Before commit() nothing that others can see has changed (PEN_WRITE); after it, everything
 *      is durable and visible. PEN_WRITE_IN_PLACE gives only the second half.
 *   2. close() without commit() leaves no trace.
 *   3. An object does not change its geometry while it is open.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

/* How the bytes of an object travel: the paths that can carry them name one of these. */
enum object_transport {
	TRANSPORT_FILE,		/* descriptors */
	TRANSPORT_SYNTH,	/* made up in memory, struct synth */
};

/* What the store wants and what the object can do; filled by open(). Wishes of 0 are none. */
struct object_info {
	uint64_t size;
	uint32_t request_least;	/* bytes that make a request worth its cost, a power of two */
	uint32_t request_best;	/* where to begin looking for the best size, a power of two */
	uint32_t request_most;	/* bytes that it takes at once, a power of two */
	bool resend_whole;	/* what came home short is sent again from its first byte */
	uint32_t retries;	/* of one request that failed in a way that may pass ... */
	uint64_t retry_ns;	/* ... the first after this, each further one after twice as long */
	uint32_t offset_align;	/* of direct requests, in the object; 0: no direct requests */
	uint32_t memory_align;	/* of direct requests, in memory */
	bool has_residency;	/* some of it may be in the page cache */
	char filesystem[32];
	char store[64];		/* objects with the same store share one knee */
	char no_direct[160];	/* why offset_align is 0 */
};

struct pen_object;

struct object_ops {
	const char *kind;
	enum object_transport transport;
	int (*open)(struct pen_object *object, struct pen_error *err);

	/* All of [offset, offset + length), now, on the caller's thread: for headers and the like.
	 * -ESTALE with words where the object ends before. */
	int (*read)(struct pen_object *object, void *buffer, size_t length, uint64_t offset,
		    struct pen_error *err);

	/* Bytes of the range that are in the page cache. Called by lanes, in parallel. */
	int (*residency)(struct pen_object *object, uint64_t offset, uint64_t length,
			 uint64_t *resident, struct pen_error *err);

	/* It will be read through the page cache now: have it there; a few pages are asked for
	 * and not waited for. Lanes, in parallel. What cannot be fetched, the read will tell of. */
	void (*fetch)(struct pen_object *object, uint64_t offset, uint64_t length);

	/* -ESTALE with words if the object is not as it was when it was opened. */
	int (*unchanged)(struct pen_object *object, struct pen_error *err);

	/* Drop it from the page cache. */
	int (*uncache)(struct pen_object *object, struct pen_error *err);

	/* Some libraries open a file again by its name (cuFile does): let the direct descriptor be
	 * one that has a name, if need be a temporary one. Before any request. */
	int (*need_name)(struct pen_object *object, struct pen_error *err);

	/* What was written is durable from now on, though nobody sees it yet: who has several to
	 * commit learns before the first of them that all of them can be. */
	int (*flush)(struct pen_object *object, struct pen_error *err);

	int (*commit)(struct pen_object *object, struct pen_error *err);
	void (*close)(struct pen_object *object);
};

struct pen_object {
	const struct object_ops *ops;
	uint64_t id;		/* no other object of this process ever had it: what is remembered
				   about an object is remembered under this */
	char *name;
	int start;		/* what a relative name starts at, as in os.h; not ours to close */
	enum pen_mode mode;
	bool committed;
	bool keeps_name;	/* of one that is read: another file under its name is an error */
	struct object_info info;
	int fd;			/* buffered descriptor; -1 where there is none */
	int direct_fd;		/* O_DIRECT descriptor; -1 where there is none */
	void *state;		/* the implementation's own */
};

/* pen_object_open() of a name that starts at the directory `start`, which the object needs until
 * it is closed. */
int object_open(int start, const char *name, enum pen_mode mode, uint64_t size,
		struct pen_object **object, struct pen_error *err);

extern const struct object_ops object_file_ops;
extern const struct object_ops object_synth_ops;

int object_read(struct pen_object *object, void *buffer, size_t length, uint64_t offset,
		struct pen_error *err);
int object_residency(struct pen_object *object, uint64_t offset, uint64_t length,
		     uint64_t *resident, struct pen_error *err);
void object_fetch(struct pen_object *object, uint64_t offset, uint64_t length);
int object_unchanged(struct pen_object *object, struct pen_error *err);
int object_uncache(struct pen_object *object, struct pen_error *err);
int object_need_name(struct pen_object *object, struct pen_error *err);
int object_flush(struct pen_object *object, struct pen_error *err);

/* How residency is asked for this object: "cachestat", "mincore", "samples", "none". */
const char *object_residency_method(const struct pen_object *object);

#endif
