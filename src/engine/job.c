/* SPDX-License-Identifier: MIT */
/* Starting, watching and ending jobs; see job.h for the states and rules. */
#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/job.h"
#include "engine/warm.h"
#include "io/object.h"
#include "sys/os.h"

/* Was it started before this process was forked? Its threads are not here then. */
static bool inherited(const struct pen_job *job)
{
	return job->generation != os_generation();
}

bool job_running(struct pen_job *job)
{
	if (atomic_load_explicit(&job->cancelled, memory_order_relaxed)) {
		int running = PEN_RUNNING;

		atomic_compare_exchange_strong(&job->state, &running, PEN_DRAINING);
	}
	return atomic_load_explicit(&job->state, memory_order_relaxed) == PEN_RUNNING;
}

void job_fail(struct pen_job *job, const struct pen_error *err)
{
	int running = PEN_RUNNING;

	pthread_mutex_lock(&job->lock);
	if (!job->error.code)
		job->error = *err;
	atomic_store(&job->failed, true);
	atomic_compare_exchange_strong(&job->state, &running, PEN_DRAINING);
	pthread_mutex_unlock(&job->lock);
}

int job_allocate(struct pen_job *job, unsigned int device, struct pen_error *err)
{
	int rc = 0;

	/* The plan's first device is the job's, its first place what is allocated. */
	if (!job->options.allocate || device)
		return 0;
	pthread_mutex_lock(&job->lock);
	if (!job->allocated) {
		rc = pen_device_alloc(job->device, job->options.allocate, &job->allocated, err);
		if (!rc)
			atomic_store(&job->schedule->plan->places[0].base,
				     (uintptr_t)job->allocated);
	}
	pthread_mutex_unlock(&job->lock);
	return rc;
}

int job_stream_join(struct pen_job *job, unsigned int device, unsigned int stream,
		    struct pen_error *err)
{
	struct pen_device *of = job->devices[device].device;
	struct job_stream *own = &job->devices[device].streams[stream];
	int rc = 0;

	pthread_mutex_lock(&job->lock);
	if (!own->users) {
		rc = device_stream_open(of, &own->stream, err);
		for (size_t i = 0; i < job->after_count && !rc; i++) {
			rc = device_wait(of, &own->stream, &job->after[i].fence, err);
			if (rc)
				device_stream_close(of, &own->stream);
		}
	}
	own->users += !rc;
	pthread_mutex_unlock(&job->lock);
	return rc;
}

void job_stream_leave(struct pen_job *job, unsigned int device, unsigned int stream)
{
	struct job_stream *own = &job->devices[device].streams[stream];
	struct device_stream unused;
	bool last;

	pthread_mutex_lock(&job->lock);
	last = !--own->users;
	unused = own->stream;
	pthread_mutex_unlock(&job->lock);
	/* Not under the lock: it waits for what the stream waits for, which may be the caller's. */
	if (last)
		device_stream_close(job->devices[device].device, &unused);
}

void job_lane_ended(struct pen_job *job)
{
	pthread_mutex_lock(&job->lock);
	if (atomic_fetch_sub(&job->running, 1) == 1) {
		atomic_store(&job->end_ns, os_now());
		pthread_cond_broadcast(&job->news);
		if (atomic_load(&job->eventfd) >= 0)
			os_eventfd_add(atomic_load(&job->eventfd));
	}
	pthread_mutex_unlock(&job->lock);
}

/* After the last lane; also undoes a job that never ran. */
static void job_free(struct pen_job *job)
{
	for (unsigned int i = 0; i < job->lane_count; i++)
		lane_fini(&job->lanes[i]);
	for (size_t i = 0; i < job->after_count; i++)
		device_fence_close(job->after[i].device, &job->after[i].fence);
	free(job->after);
	free(job->lanes);
	groups_fini(&job->arrived);
	groups_fini(&job->gathered);
	if (atomic_load(&job->eventfd) >= 0)
		os_close(atomic_load(&job->eventfd));
	free(job->digests);
	free(job->asked);
	schedule_free(job->schedule);
	pthread_cond_destroy(&job->news);
	pthread_mutex_destroy(&job->lock);
	free(job->inject);
	if (job->coded.free)
		job->coded.free(job->coded.context);
	free(job);
}

static int set_up_lanes(struct pen_job *job)
{
	const struct schedule *schedule = job->schedule;
	unsigned int count = 0;

	for (unsigned int p = 0; p < schedule->path_count; p++)
		count += schedule->paths[p].lanes;
	job->lanes = os_calloc(count ? count : 1, sizeof(job->lanes[0]));
	if (!job->lanes)
		return -ENOMEM;
	for (unsigned int p = 0; p < schedule->path_count; p++)
		for (unsigned int i = 0; i < schedule->paths[p].lanes; i++) {
			struct lane *lane = &job->lanes[job->lane_count++];

			if (lane_init(lane, job, &schedule->paths[p], i))
				return -ENOMEM;
		}
	return 0;
}

static void set_up_devices(struct pen_job *job)
{
	const struct plan *plan = job->schedule->plan;

	for (unsigned int i = 0; i < plan->device_count; i++) {
		job->devices[i].device = plan->devices[i];
		if (plan->devices[i] == job->schedule->gpu)
			job->staging_device = i;
		job->uses_host |= plan->devices[i]->is_host && plan->device_bytes[i];
	}
}

static void set_up_budget(struct pen_job *job)
{
	const struct schedule *schedule = job->schedule;
	uint64_t pieces = schedule->memory_limit / schedule->piece_size;

	job->budget.piece_size = schedule->piece_size;
	job->budget.gathers = schedule->ahead;
	job->budget.left = pieces < INT_MAX ? (int)pieces : INT_MAX;
	for (unsigned int p = 0; p < schedule->path_count; p++) {
		const struct path *path = &schedule->paths[p];

		job->budget.kept += (int)schedule_pieces_kept(schedule, path);
		job->budget.together += (int)(path->lanes * path->pieces_first);
	}
}

/* The knee finder, within what the lanes may hold and the stores wish. */
static void set_up_tuner(struct pen_job *job)
{
	const struct schedule *schedule = job->schedule;
	const struct object_info *info;

	if (!schedule->plan->object_count)
		return;
	info = &schedule->plan->objects[0]->info;
	job->request_least = info->request_least;
	for (unsigned int p = 0; p < schedule->path_count; p++) {
		const struct path *path = &schedule->paths[p];
		struct tuner_setting wished = { (uint32_t)job->options.request_size,
						job->options.depth };
		struct tuner_limits limits = {
			.size_least = info->request_least > schedule->unit ?
					      info->request_least : (uint32_t)schedule->unit,
			.size_best = info->request_best,
			.size_max = path->size,
			.depth_max = path->lanes * (path->kind->queue->waits ? 1 : LANE_DEPTH),
			.bytes_max = schedule->memory_limit,
		};

		if (path->tuned)
			tuner_init(&job->tuner, info->store, job->direction != PEN_READ, wished,
				   limits);
	}
}

static int set_up_digests(struct pen_job *job)
{
	const struct plan *plan = job->schedule->plan;
	size_t count = job->options.digest_count;

	if (!count)
		return 0;
	job->asked = os_calloc(count, sizeof(job->asked[0]));
	job->digests = os_calloc(plan->object_count + 1, sizeof(job->digests[0]));
	if (!job->asked || !job->digests)
		return -ENOMEM;
	memcpy(job->asked, job->options.digests, count * sizeof(job->asked[0]));
	for (size_t i = 0; i < count; i++)
		for (size_t o = 0; o < plan->object_count; o++)
			if (plan->objects[o] == job->asked[i].object)
				job->digests[o] = &job->asked[i];
	return 0;
}

static int copy_inject(struct pen_job *job)
{
	if (!job->options.inject)
		return 0;
	job->inject = os_calloc(1, strlen(job->options.inject) + 1);
	if (!job->inject)
		return -ENOMEM;
	strcpy(job->inject, job->options.inject);
	job->options.inject = job->inject;
	return 0;
}

static int set_up_groups(struct pen_job *job)
{
	const struct plan *plan = job->schedule->plan;
	uint64_t count = job->options.groups;
	int rc = groups_init(&job->arrived, count, plan, &job->lock, &job->news, &job->eventfd);

	if (!rc && job->direction != PEN_READ)
		rc = groups_init(&job->gathered, count, plan, &job->lock, &job->news,
				 &job->eventfd);
	return rc;
}

/* Takes the schedule over, also on an error. */
static int job_new(enum pen_mode direction, struct pen_device *device, struct schedule *schedule,
		   const struct pen_options *options, struct pen_job **result)
{
	struct pen_job *job = os_calloc(1, sizeof(*job));
	pthread_condattr_t clock;

	if (!job) {
		schedule_free(schedule);
		return -ENOMEM;
	}
	pthread_mutex_init(&job->lock, NULL);
	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(&job->news, &clock);
	pthread_condattr_destroy(&clock);
	job->direction = direction;
	job->device = device;
	job->options = *options;
	job->state = PEN_PLANNED;
	job->eventfd = -1;
	job->generation = os_generation();
	job->schedule = schedule;
	job->refused_count = schedule->refused_count;
	memcpy(job->refused, schedule->refused, sizeof(job->refused));
	for (int side = 0; side < SIDES; side++)
		job->bytes_left[side] = schedule->work[side].bytes;
	set_up_devices(job);
	set_up_budget(job);
	set_up_tuner(job);
	if (copy_inject(job) || set_up_groups(job) || set_up_digests(job) || set_up_lanes(job)) {
		job_free(job);
		return -ENOMEM;
	}
	*result = job;
	return 0;
}

/* Start the lanes. One that cannot be started is done without, as long as its path has another. */
static void job_start(struct pen_job *job)
{
	job->state = PEN_RUNNING;
	job->running = job->lane_count;
	/* Host memory can always take bytes; a GPU's lanes tell when it can. */
	if (!job->schedule->gpu)
		job->ready_ns = os_now();
	for (unsigned int i = 0; i < job->lane_count; i++) {
		struct lane *lane = &job->lanes[i];
		struct pen_error err;
		int rc = os_thread_start(&lane->thread, lane_run, lane);

		lane->started = !rc;
		if (!rc)
			continue;
		/* No lane has taken its pieces yet. */
		job->budget.together -= (int)lane->planned->pieces_first;
		job_lane_ended(job);
		if (lane->index)
			continue;
		error_sys(&err, rc, "start a thread for", "the transfer", -1);
		error_hint(&err, "Raise the limit of processes (ulimit -u) or use fewer lanes");
		job_fail(job, &err);
	}
	atomic_store(&job->started, true);
}

/* Host memory that cannot be had is refused before it is planned for. */
static int check_allocation(struct pen_device *device, uint64_t size, struct pen_error *err)
{
	void *memory;
	int rc;

	if (!size || !device->is_host)
		return 0;
	rc = pen_device_alloc(device, size, &memory, err);
	return rc ? rc : pen_device_free(device, memory, size, err);
}

/* The order behind the callers' streams is taken now, and on this thread: a handle may mean "the
 * stream of the thread that calls". */
static int follow_stream(struct pen_job *job, struct pen_device *device, void *stream,
			 struct pen_error *err)
{
	struct job_after *after = &job->after[job->after_count];
	int rc;

	if (!stream)
		return 0;
	after->device = device;
	rc = device_fence_behind(device, stream, &after->fence, err);
	job->after_count += !rc;
	return rc;
}

static int follow_streams(struct pen_job *job, struct pen_error *err)
{
	const struct pen_options *options = &job->options;
	int rc;

	job->after = os_calloc(options->stream_count + 1, sizeof(job->after[0]));
	if (!job->after)
		return error_sys(err, -ENOMEM, "start", "a transfer", -1);
	rc = follow_stream(job, job->device, options->stream, err);
	for (size_t i = 0; i < options->stream_count && !rc; i++)
		rc = follow_stream(job, options->streams[i].device, options->streams[i].stream,
				   err);
	return rc;
}

int job_streams_check(struct pen_device *device, const struct pen_options *options,
		      struct pen_error *err)
{
	bool wrong = options->stream && device->is_host;

	for (size_t i = 0; i < options->stream_count; i++) {
		const struct pen_stream *stream = &options->streams[i];

		wrong |= !stream->device || stream->device->is_host || stream->reserved[0] ||
			 stream->reserved[1];
	}
	if (!wrong)
		return 0;
	error_set(err, -EINVAL, "follow", "a stream", -1, "it has no GPU");
	error_hint(err, "Name the stream with its GPU in options.streams");
	return -EINVAL;
}

static int start(enum pen_mode direction, struct pen_device *device,
		 const struct pen_extent *extents, size_t count, const struct pen_options *options,
		 const struct job_coded *coded, struct pen_job **job, struct pen_error *err)
{
	struct pen_options full;
	struct schedule *schedule;
	uint64_t start = os_now();
	int rc;

	error_clear(err);
	*job = NULL;
	if (direction < PEN_READ || direction > PEN_WRITE_IN_PLACE)
		return error_set(err, -EINVAL, "start", "a transfer", -1, "%d is no direction",
				 (int)direction);
	if (!device)
		return error_set(err, -EINVAL, "start", "a transfer", -1, "it has no device");
	rc = schedule_options(options, &full, err);
	if (!rc)
		rc = job_streams_check(device, &full, err);
	if (rc)
		return rc;
	if (full.allocate)
		*full.allocated = NULL;
	if (full.allocate && direction != PEN_READ)
		return error_set(err, -EINVAL, "start", "a transfer", -1,
				 "only a read can allocate its memory; a write needs bytes in it");
	rc = check_allocation(device, full.allocate, err);
	if (!rc)
		rc = schedule_new(direction, device, extents, coded ? coded->codings : NULL, count,
				  &full, &schedule, err);
	if (rc)
		return rc;
	rc = job_new(direction, device, schedule, &full, job);
	if (rc)
		return error_sys(err, rc, "start", "a transfer", -1);
	(*job)->start_ns = start;
	rc = follow_streams(*job, err);
	/* Host memory, and the memory of a job with nothing to read, can be had at once. */
	if (!rc && (device->is_host || !(*job)->lane_count))
		rc = job_allocate(*job, 0, err);
	if (rc) {
		job_free(*job);
		*job = NULL;
		return rc;
	}
	if (coded)
		(*job)->coded = *coded;
	job_start(*job);
	return 0;
}

int pen_job_start(enum pen_mode direction, struct pen_device *device,
		  const struct pen_extent *extents, size_t count,
		  const struct pen_options *options, struct pen_job **job, struct pen_error *err)
{
	return start(direction, device, extents, count, options, NULL, job, err);
}

int job_start_coded(struct pen_device *device, const struct pen_extent *extents, size_t count,
		    const struct pen_options *options, const struct job_coded *coded,
		    struct pen_job **job, struct pen_error *err)
{
	return start(PEN_READ, device, extents, count, options, coded, job, err);
}

void pen_job_poll(struct pen_job *job, struct pen_progress *progress)
{
	/* Asked for before the look: of a job that runs, it is earlier than the end. */
	uint64_t now = os_now(), end;
	bool ended = !atomic_load(&job->running);
	int state = atomic_load(&job->state);

	/* The last lane has gone, and may be about to write down when. */
	if (ended && !atomic_load(&job->end_ns) && !inherited(job)) {
		pthread_mutex_lock(&job->lock);
		pthread_mutex_unlock(&job->lock);
	}
	end = atomic_load(&job->end_ns);
	progress->total = job->schedule->plan->bytes;
	progress->bytes = job_bytes(job);
	progress->seconds = (double)((ended && end ? end : now) - job->start_ns) / 1e9;
	if (ended && state == PEN_RUNNING)
		state = PEN_DONE;
	else if (ended && state == PEN_DRAINING)
		state = atomic_load(&job->failed) ? PEN_FAILED : PEN_CANCELLED;
	progress->state = inherited(job) ? PEN_FAILED : state;
}

void pen_job_cancel(struct pen_job *job)
{
	/* Only a flag: this runs in signal handlers. Lanes look at it all the time. */
	atomic_store(&job->cancelled, true);
}

/* What only the end can tell: did a file change while it was read? And the cache policy. */
static void settle_objects(struct pen_job *job)
{
	struct pen_error err;

	for (size_t i = 0; i < job->schedule->plan->object_count; i++) {
		struct pen_object *object = job->schedule->plan->objects[i];

		/* Who cancelled does not ask whether the file changed meanwhile. */
		if (atomic_load(&job->state) == PEN_RUNNING && object_unchanged(object, &err))
			job_fail(job, &err);
		if (job->options.cache == PEN_CACHE_DROP)
			warm_drop(&warm_process, object);
		/* Dropping what was written flushes it first, and a failed flush is told only once:
		 * a later commit would not see it. */
		if (job->options.cache == PEN_CACHE_DROP && object_uncache(object, &err))
			job_fail(job, &err);
	}
}

int pen_job_wait_for(struct pen_job *job, double seconds)
{
	struct timespec until = os_from_now(seconds);
	int rc = 0;

	if (inherited(job))
		return 0;
	pthread_mutex_lock(&job->lock);
	while (atomic_load(&job->running) && !rc)
		rc = pthread_cond_timedwait(&job->news, &job->lock, &until);
	pthread_mutex_unlock(&job->lock);
	return -rc;
}

/* A child of fork() has the job's memory, but not its threads. */
static int refuse_child(struct pen_error *err)
{
	error_set(err, -ECHILD, "finish", "the transfer", -1,
		  "it was started before this process was forked");
	error_hint(err, "Wait for it in the process that started it");
	return -ECHILD;
}

int pen_job_eventfd(struct pen_job *job, struct pen_error *err)
{
	int fd;

	error_clear(err);
	if (inherited(job))
		return refuse_child(err);
	pthread_mutex_lock(&job->lock);
	fd = atomic_load(&job->eventfd);
	if (fd < 0) {
		fd = os_eventfd();
		if (fd >= 0)
			atomic_store(&job->eventfd, fd);
		/* What came before is told by this, what comes now by those who bring it. */
		if (fd >= 0 && (!atomic_load(&job->running) || job->arrived.entered ||
				job->gathered.entered))
			os_eventfd_add(fd);
	}
	pthread_mutex_unlock(&job->lock);
	if (fd < 0) {
		error_sys(err, fd, "make", "an eventfd", -1);
		if (fd == -EMFILE)
			error_hint(err, "Raise the limit of open files (ulimit -n)");
	}
	return fd;
}

static size_t tell(struct pen_job *job, struct groups *groups, uint64_t *told, size_t room,
		   double seconds)
{
	struct timespec until = os_from_now(seconds);

	return inherited(job) ? 0 : groups_tell(groups, &job->running, told, room, &until);
}

size_t pen_job_landed(struct pen_job *job, uint64_t *groups, size_t room, double seconds)
{
	return job->direction == PEN_READ ? tell(job, &job->arrived, groups, room, seconds) : 0;
}

size_t pen_job_gathered(struct pen_job *job, uint64_t *groups, size_t room, double seconds)
{
	return tell(job, &job->gathered, groups, room, seconds);
}

size_t pen_job_stored(struct pen_job *job, uint64_t *groups, size_t room, double seconds)
{
	return job->direction == PEN_READ ? 0 : tell(job, &job->arrived, groups, room, seconds);
}

/* What becomes of bytes that were read around the page cache, which holds nothing of them. */
static void settle_cache(struct pen_job *job)
{
	int cache = job->options.cache;

	if (job->direction != PEN_READ || !job->schedule->work[AROUND].count ||
	    job->schedule->plan->objects[0]->ops->transport != TRANSPORT_FILE)
		return;
	if (cache == PEN_CACHE_AFTER || cache == PEN_CACHE_AFTER_UNASKED)
		warm_begin(&warm_process, job->schedule, cache == PEN_CACHE_AFTER_UNASKED,
			   &job->warming_bytes, job->cache_reason);
	else
		text_copy(job->cache_reason, sizeof(job->cache_reason),
			  "read around the page cache, which has nothing of them");
}

/* Memory the job allocated is the caller's if all went well, and nobody's otherwise. */
static void hand_over_memory(struct pen_job *job, int rc)
{
	if (!job->options.allocate)
		return;
	*job->options.allocated = rc ? NULL : job->allocated;
	if (rc)
		pen_device_free(job->device, job->allocated, job->options.allocate, NULL);
}

int pen_job_wait(struct pen_job *job, struct pen_report *report, struct pen_error *err)
{
	int rc = job_report_check(report, err);

	if (rc)
		return rc;
	if (inherited(job))
		return refuse_child(err);
	for (unsigned int i = 0; i < job->lane_count; i++)
		if (job->lanes[i].started)
			pthread_join(job->lanes[i].thread, NULL);
	if (!job->end_ns)
		job->end_ns = os_now();
	settle_objects(job);
	if (job->error.code) {
		job->state = PEN_FAILED;
		rc = job->error.code;
		if (err)
			*err = job->error;
	} else if (job->state == PEN_DRAINING) {
		job->state = PEN_CANCELLED;
		rc = error_set(err, -ECANCELED, "finish", "the transfer", -1, "it was cancelled");
	} else {
		/* No lane had anything to do with the device that the memory is of. */
		rc = job_allocate(job, 0, err);
		job->state = rc ? PEN_FAILED : PEN_DONE;
		tuner_fini(&job->tuner);
		settle_cache(job);
	}
	hand_over_memory(job, rc);
	if (report)
		job_report(job, report);
	job_free(job);
	return rc;
}

int pen_transfer(enum pen_mode direction, struct pen_device *device,
		 const struct pen_extent *extents, size_t count, const struct pen_options *options,
		 struct pen_report *report, struct pen_error *err)
{
	struct pen_job *job;
	int rc = job_report_check(report, err);

	if (!rc)
		rc = pen_job_start(direction, device, extents, count, options, &job, err);
	return rc ? rc : pen_job_wait(job, report, err);
}
