/* SPDX-License-Identifier: MIT */
#ifndef SYS_CUFILE_H
#define SYS_CUFILE_H
/*
 * cuFile (GPUDirect Storage), opened at run time. The library takes hundreds of milliseconds to
 * start and may open a context on every GPU, so nothing here starts it before cufile_open():
 * gds.h answers from a few small files whether asking is worth it.
 *
 * Files are registered once per process, whoever asks: the library refuses a second
 * registration of the same descriptor, and lanes share objects. Hence take/put, counted.
 *
 * All functions may be called from any thread; those that move bytes want the device's context
 * current. They return 0 or a negative errno with words.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>
#include "penstock.h"

/* The library's own batch structures (CUfileIOParams_t, CUfileIOEvents_t), so that the caller
 * can keep them in memory of its own. */
struct cufile_batch_entry {
	int mode;		/* CUFILE_MODE_BATCH */
	void *base;
	off_t offset;		/* in the file */
	off_t base_offset;
	size_t size;
	void *file;
	int opcode;		/* 0 read, 1 write */
	void *cookie;
};

struct cufile_batch_event {
	void *cookie;
	int status;		/* enum cufile_batch_status */
	size_t moved;		/* bytes, or a negative error in the same bits */
};

enum { CUFILE_MODE_BATCH = 1, CUFILE_BATCH_MAX = 128 };

enum cufile_batch_status {
	CUFILE_WAITING = 1,
	CUFILE_PENDING = 2,
	CUFILE_INVALID = 4,
	CUFILE_CANCELED = 8,
	CUFILE_COMPLETE = 16,
	CUFILE_TIMEOUT = 32,
	CUFILE_FAILED = 64,
};

/* What is known once the library is open. */
struct cufile_facts {
	int version;			/* 1000 x major + 10 x minor; 0: it does not say */
	unsigned int stores;		/* a bit for each kind of store nvidia-fs can serve */
	bool p2pdma;			/* NVMe by PCI P2PDMA, without nvidia-fs */
	unsigned int batch_max;		/* entries of one batch, at most CUFILE_BATCH_MAX */
};

/* One movement of bytes. A stream call reads the numbers when it executes and writes `moved`
 * then: the record must stay where it is until the stream has passed the call. */
struct cufile_io {
	bool write;
	void *file;			/* from cufile_file_take() */
	const char *name;		/* of the object, for words */
	void *base;			/* anywhere in device memory */
	size_t size;
	off_t offset;			/* in the file */
	off_t base_offset;
	ssize_t moved;
};

/* `moved` before a stream call has run: no count and no error looks like it. */
#define CUFILE_NOT_RUN INT64_MIN

/* Load the library and open its driver, once per process; the first call is slow. Counted. */
int cufile_open(struct pen_error *err);
void cufile_close(void);

/* Close the driver where nobody uses it. It stays open otherwise: opening again is slow. */
void cufile_trim(void);

/* Between cufile_open() and cufile_close(). */
const struct cufile_facts *cufile_facts(void);

/* The file must stay open until it is put. */
int cufile_file_take(int fd, const char *name, void **file, struct pen_error *err);
void cufile_file_put(void *file);

/* Move bytes now. io->moved is what came across; 0 on a read is the end of the file. */
int cufile_move(struct cufile_io *io, struct pen_error *err);

/* Move bytes in the order of a stream (CUstream). */
int cufile_stream_open(void *stream, struct pen_error *err);
void cufile_stream_close(void *stream);
int cufile_stream_move(struct cufile_io *io, void *stream, struct pen_error *err);

/* Batches hold one submission at a time. close() cancels what is under way; *batch is NULL where
 * open() fails. */
int cufile_batch_open(unsigned int entries, void **batch, struct pen_error *err);
int cufile_batch_submit(void *batch, unsigned int count, struct cufile_batch_entry *entries,
			struct pen_error *err);
/* *count: room in `events`, then how many were filled. Waits for one, up to `wait_ns`. */
int cufile_batch_poll(void *batch, unsigned int *count, struct cufile_batch_event *events,
		      uint64_t wait_ns, struct pen_error *err);
void cufile_batch_close(void *batch);

/* What a stream call or a batch entry left behind: 0 with io->moved a byte count, or an errno. */
int cufile_outcome(struct cufile_io *io, struct pen_error *err);
int cufile_batch_outcome(struct cufile_io *io, const struct cufile_batch_event *event,
			 struct pen_error *err);

#endif
