/* SPDX-License-Identifier: MIT */
#ifndef IO_QUEUE_H
#define IO_QUEUE_H
/*
 * A queue is how requests travel between an object and memory. One instance belongs to one lane
 * (one thread); nothing here is locked. Code above calls the queue_*() wrappers only: they check
 * the contract both ways.
 *
 * A request's life, from the queue's side:
 *
 *   (caller's) --submit--> queued --reap--> (caller's again: failed, short or full)
 *                                             --release--> buffer let go
 *
 * Invariants
 *   1. submit() queues or says -EAGAIN; it never waits for room. (A synchronous queue does the
 *      work inside submit() and hands the result out in the next reap().)
 *   2. Every queued request comes home through reap() exactly once, in any order.
 *   3. A request that came home is failed (result < 0), short (done < length) or full. The queue
 *      itself never retries and never resubmits: the lane does, in one place.
 *   4. fini() returns when neither the kernel nor a library holds a buffer of ours.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "io/object.h"
#include "mem/device.h"
#include "penstock.h"

struct queue_request {
	/* Set by the caller. */
	struct pen_object *object;
	uint64_t offset;		/* in the object */
	size_t length;			/* bytes that must move */
	size_t room;			/* >= length: a direct read may ask for this much, for
					   alignment; what is past length is not needed */
	unsigned char *buffer;		/* host memory; device memory where ops->on_device; set by
					   the queue itself where ops->lends */
	int buffer_index;		/* of the attached piece that holds the buffer, or -1 */
	bool write;
	bool direct;			/* through the O_DIRECT descriptor */
	uint64_t serial;		/* 1, 2, 3 ... over the whole job; injection counts by it */
	unsigned int attempt;		/* 0 for the first try */

	/* Set by the queue. */
	int result;			/* 0, or a negative errno */
	size_t done;			/* bytes moved, when result is 0; up to room */
	uint64_t started_ns, ended_ns;	/* os_now() at submit and at completion */

	/* The queue's own, while queued. */
	struct queue_request *next;
	uint64_t due_ns;
	void *mapping;
	size_t mapping_size;

	/* Where result < 0 and the queue knows more. Large, so it is last: who prepares a request
	 * clears what comes before it. */
	struct pen_error error;
};

struct queue_setup {
	struct pen_device *device;	/* where bytes go; for queues on_device or that lend */
	unsigned int depth;		/* most requests ever queued at once */
	unsigned int pieces;		/* most pieces ever attached */
	int transfer;			/* cufile's flavour: PEN_GPU_DIRECT or another of its */
	const char *inject;		/* for the fault queue */
	_Atomic uint64_t *injected;	/* counts injections, shared by all lanes of a job */
};

struct queue;

struct queue_ops {
	const char *name;
	bool on_device;	/* buffers are device memory; nothing is staged */
	bool lends;	/* the queue provides the buffer; release() takes it back */
	bool waits;	/* submit() does the work: one request at a time */

	/* Lane's thread, once. May be slow. */
	int (*init)(struct queue *queue, const struct queue_setup *setup, struct pen_error *err);

	/* Piece `index` of the ring exists from now on: register it with the kernel where that
	 * helps. Never fails: without registration requests travel the plain way. */
	void (*attach)(struct queue *queue, unsigned int index, void *memory, size_t size);

	/* 0, or -EAGAIN where the queue is full. Any other trouble comes home through reap(). */
	int (*submit)(struct queue *queue, struct queue_request *request);

	/* Up to `max` finished requests; waits up to `wait_ns` for the first (0: just look).
	 * Returns how many. Must flush what submit() has gathered. */
	unsigned int (*reap)(struct queue *queue, struct queue_request **requests,
			     unsigned int max, uint64_t wait_ns);

	/* The device has let go of the buffer of a request that came home. */
	void (*release)(struct queue *queue, struct queue_request *request);

	/* Lane's thread, once, after everything queued came home. */
	void (*fini)(struct queue *queue);
};

struct queue {
	const struct queue_ops *ops;
	const struct queue_ops *inner;	/* the same, or what the fault queue is put around */
	struct queue_setup setup;
	unsigned int queued;	/* submitted and not yet home; kept by the wrapper */
	void *state;		/* the implementation's own */
};

extern const struct queue_ops queue_sync_ops;
extern const struct queue_ops queue_uring_ops;
extern const struct queue_ops queue_cufile_ops;
extern const struct queue_ops queue_map_ops;
extern const struct queue_ops queue_synth_ops;
extern const struct queue_ops queue_fault_ops;

/* With setup->inject a fault queue is put around `ops`. */
int queue_init(struct queue *queue, const struct queue_ops *ops, const struct queue_setup *setup,
	       struct pen_error *err);
void queue_attach(struct queue *queue, unsigned int index, void *memory, size_t size);
int queue_submit(struct queue *queue, struct queue_request *request);
unsigned int queue_reap(struct queue *queue, struct queue_request **requests, unsigned int max,
			uint64_t wait_ns);
void queue_release(struct queue *queue, struct queue_request *request);
void queue_fini(struct queue *queue);

/* Requests in the order they were given: what queues keep theirs in. */
struct queue_list {
	struct queue_request *first, *last;
};

static inline void queue_list_add(struct queue_list *list, struct queue_request *request)
{
	request->next = NULL;
	if (list->last)
		list->last->next = request;
	else
		list->first = request;
	list->last = request;
}

static inline struct queue_request *queue_list_take(struct queue_list *list)
{
	struct queue_request *request = list->first;

	if (request) {
		list->first = request->next;
		if (!list->first)
			list->last = NULL;
	}
	return request;
}

/* Slots for queues that need no memory attached and lend none. */
void queue_attach_nothing(struct queue *queue, unsigned int index, void *memory, size_t size);
void queue_release_nothing(struct queue *queue, struct queue_request *request);

/* -EINVAL with words where --inject's text cannot be understood. */
int queue_inject_check(const char *text, struct pen_error *err);

/* Can O_DIRECT through io_uring be had here? Probed once, by doing. 0, or an errno with words. */
int queue_uring_probe(struct pen_error *err);

/* 0 where real GPUDirect Storage may be possible here, by cheap evidence only; else the reason. */
int queue_cufile_evidence(char *reason, size_t size);

/* cuFile: can it be used for this object into this device, and is it the real thing?
 * 0 and *compat (then the reason for it is in err->message), or a negative errno with words
 * (driver, handle, file system). Opens the driver; slow the first time. */
int queue_cufile_probe(struct pen_object *object, struct pen_device *device, bool *compat,
		       struct pen_error *err);

#endif
