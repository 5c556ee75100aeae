/* SPDX-License-Identifier: MIT */
/*
 * io_uring: many requests in flight from one thread. Ring pieces are registered as fixed buffers
 * and descriptors as fixed files where the kernel takes them; where it does not, the same
 * requests travel with plain pointers and descriptors.
 *
 * Invariants
 *   1. `unsent` holds, in order, the requests whose entries the kernel has not consumed yet.
 *   2. A submission that the kernel refuses for good is taken back from the ring and its requests
 *      come home failed, so nothing is ever waited for that was not sent.
 */
#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "io/queue.h"
#include "sys/fault.h"
#include "sys/os.h"

#define FILES_MAX 64
/* A kernel that is too busy is asked again for this long. */
#define BUSY_NS 300000000ull
#define BUSY_PAUSE_NS 100000ull

struct uring_state {
	struct io_uring ring;
	bool fixed_buffers, fixed_files;
	bool attached[256];		/* pieces the kernel has */
	uint64_t files[FILES_MAX];	/* descriptors the kernel has: whose, and which */
	unsigned int file_count;
	struct queue_list unsent;
	unsigned int unsent_count;
	struct queue_list failed;	/* taken back; to be handed out */
	uint64_t busy_since;		/* the kernel takes nothing since; 0: it does */
};

/* Not to be mistaken for one of the standard streams; see os.h. */
static int move_up(struct io_uring *ring)
{
	int fd = os_above_standard(ring->ring_fd);

	if (fd < 0) {
		/* It is closed already; the rest goes with a descriptor that is none. */
		ring->ring_fd = ring->enter_ring_fd = -1;
		io_uring_queue_exit(ring);
		return fd;
	}
	ring->ring_fd = ring->enter_ring_fd = fd;
	return 0;
}

static int ring_open(struct io_uring *ring, unsigned int depth)
{
	int fault = sys_fault("io_uring_setup"), rc;

	if (fault)
		return -fault;
	/* One thread only, completions on our terms; kernels before 6.0 know neither. */
	rc = io_uring_queue_init(depth, ring,
				 IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN);
	if (rc == -EINVAL)
		rc = io_uring_queue_init(depth, ring, 0);
	return rc ? rc : move_up(ring);
}

static int advise(int rc, struct pen_error *err)
{
	error_sys(err, rc, "set up", "io_uring", -1);
	if (rc == -EPERM || rc == -EACCES)
		error_hint(err, "It is forbidden here: by kernel.io_uring_disabled, or by the "
				"container's seccomp profile (Docker's default does)");
	else if (rc == -ENOSYS)
		error_hint(err, "The kernel has no io_uring; 5.6 or newer has");
	else if (rc == -ENOMEM)
		error_hint(err, "Raise the limit of locked memory (ulimit -l)");
	return rc;
}

static pthread_mutex_t probe_lock = PTHREAD_MUTEX_INITIALIZER;
static bool probed;			/* guarded by probe_lock */
static struct pen_error probe_error;	/* does not change once probed */

__attribute__((constructor)) static void mind_forks(void)
{
	os_at_fork(OS_FORK_URING, &probe_lock, NULL);
}

/* By doing: versions lie under seccomp and in containers. */
static void probe(void)
{
	struct io_uring ring;
	struct io_uring_probe *ops;
	int rc = ring_open(&ring, 4);

	if (rc) {
		advise(rc, &probe_error);
		return;
	}
	ops = io_uring_get_probe_ring(&ring);
	if (!ops || !io_uring_opcode_supported(ops, IORING_OP_READ))
		error_set(&probe_error, -ENOSYS, "set up", "io_uring", -1,
			  "it lacks plain reads and writes (kernel 5.6)");
	io_uring_free_probe(ops);
	io_uring_queue_exit(&ring);
}

int queue_uring_probe(struct pen_error *err)
{
	pthread_mutex_lock(&probe_lock);
	if (!probed)
		probe();
	probed = true;
	pthread_mutex_unlock(&probe_lock);
	if (probe_error.code && err)
		*err = probe_error;
	return probe_error.code;
}

static int uring_init(struct queue *queue, const struct queue_setup *setup, struct pen_error *err)
{
	struct uring_state *state = os_calloc(1, sizeof(*state));
	int rc;

	if (!state)
		return error_sys(err, -ENOMEM, "set up", "io_uring", -1);
	rc = ring_open(&state->ring, setup->depth);
	if (rc) {
		free(state);
		return advise(rc, err);
	}
	if (setup->pieces && setup->pieces <= sizeof(state->attached) &&
	    !sys_fault("io_uring_register"))
		state->fixed_buffers = !io_uring_register_buffers_sparse(&state->ring,
									 setup->pieces);
	if (!sys_fault("io_uring_register"))
		state->fixed_files = !io_uring_register_files_sparse(&state->ring, FILES_MAX);
	queue->state = state;
	return 0;
}

static void uring_attach(struct queue *queue, unsigned int index, void *memory, size_t size)
{
	struct uring_state *state = queue->state;
	struct iovec iov = { memory, size };
	__u64 tag = 0;

	if (!state->fixed_buffers || sys_fault("io_uring_register"))
		return;
	state->attached[index] =
		io_uring_register_buffers_update_tag(&state->ring, index, &iov, &tag, 1) == 1;
}

/* The kernel's index of the descriptor that a request goes by, or -1. Kept under the object's
 * number: that of a descriptor may be another file's tomorrow. */
static int fixed_file(struct uring_state *state, const struct queue_request *request, int fd)
{
	uint64_t key = request->object->id * 2 + request->direct;
	unsigned int i;

	if (!state->fixed_files)
		return -1;
	for (i = 0; i < state->file_count; i++)
		if (state->files[i] == key)
			return (int)i;
	if (i == FILES_MAX || io_uring_register_files_update(&state->ring, i, &fd, 1) != 1)
		return -1;
	state->files[i] = key;
	state->file_count++;
	return (int)i;
}

static int uring_submit(struct queue *queue, struct queue_request *request)
{
	struct uring_state *state = queue->state;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&state->ring);
	int fd = request->direct ? request->object->direct_fd : request->object->fd;
	int file, buffer = request->buffer_index;
	unsigned int want;

	if (!sqe)
		return -EAGAIN;
	want = (unsigned int)(request->direct && !request->write ? request->room : request->length);
	if (buffer >= 0 && !state->attached[buffer])
		buffer = -1;
	file = fixed_file(state, request, fd);
	if (file >= 0)
		fd = file;
	if (request->write && buffer >= 0)
		io_uring_prep_write_fixed(sqe, fd, request->buffer, want, request->offset, buffer);
	else if (request->write)
		io_uring_prep_write(sqe, fd, request->buffer, want, request->offset);
	else if (buffer >= 0)
		io_uring_prep_read_fixed(sqe, fd, request->buffer, want, request->offset, buffer);
	else
		io_uring_prep_read(sqe, fd, request->buffer, want, request->offset);
	if (file >= 0)
		sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, request);
	queue_list_add(&state->unsent, request);
	state->unsent_count++;
	return 0;
}

/* Take back what the kernel refuses to take, and let it come home failed. */
static void take_back(struct uring_state *state, int rc)
{
	struct io_uring_sq *sq = &state->ring.sq;
	struct queue_request *request;

	sq->sqe_head = sq->sqe_tail = *sq->khead;
	*sq->ktail = *sq->khead;
	while ((request = queue_list_take(&state->unsent)) != NULL) {
		request->result = rc;
		queue_list_add(&state->failed, request);
	}
	state->unsent_count = 0;
}

/* Hand what was gathered to the kernel. */
static void hand_over(struct uring_state *state)
{
	int rc, fault;

	while (state->unsent_count) {
		fault = sys_fault("io_uring_enter");
		rc = fault ? -fault : io_uring_submit(&state->ring);
		if (rc > 0) {
			state->busy_since = 0;
			for (state->unsent_count -= (unsigned int)rc; rc; rc--)
				queue_list_take(&state->unsent);
			continue;
		}
		/* Out of some resource for the moment: completions will free it. */
		if (!state->busy_since)
			state->busy_since = os_now();
		if ((rc == -EINTR || rc == -EAGAIN || rc == -EBUSY) &&
		    os_now() - state->busy_since < BUSY_NS) {
			os_sleep(BUSY_PAUSE_NS);
			return;
		}
		state->busy_since = 0;
		take_back(state, rc ? rc : -EIO);
	}
}

static unsigned int uring_reap(struct queue *queue, struct queue_request **requests,
			       unsigned int max, uint64_t wait_ns)
{
	struct uring_state *state = queue->state;
	struct io_uring_cqe *cqe;
	unsigned int count = 0;

	hand_over(state);
	while (count < max && (requests[count] = queue_list_take(&state->failed)) != NULL)
		count++;
	if (!count && wait_ns && io_uring_peek_cqe(&state->ring, &cqe)) {
		struct __kernel_timespec ts = { (long long)(wait_ns / 1000000000ull),
						(long long)(wait_ns % 1000000000ull) };
		/* Timing out and being interrupted both mean: nothing yet. */
		io_uring_wait_cqe_timeout(&state->ring, &cqe, &ts);
	}
	while (count < max && !io_uring_peek_cqe(&state->ring, &cqe)) {
		struct queue_request *request = io_uring_cqe_get_data(cqe);

		if (cqe->res < 0)
			request->result = cqe->res;
		else
			request->done = (size_t)cqe->res;
		io_uring_cqe_seen(&state->ring, cqe);
		requests[count++] = request;
	}
	return count;
}

static void uring_fini(struct queue *queue)
{
	struct uring_state *state = queue->state;

	io_uring_queue_exit(&state->ring);
	free(state);
}

const struct queue_ops queue_uring_ops = {
	.name = "uring",
	.init = uring_init,
	.attach = uring_attach,
	.submit = uring_submit,
	.reap = uring_reap,
	.release = queue_release_nothing,
	.fini = uring_fini,
};
