/* SPDX-License-Identifier: MIT */
#ifndef PENSTOCK_H
#define PENSTOCK_H
/*
 * Penstock moves bytes between storage and memory - host memory, the memory of GPUs - by the
 * fastest path the machine has, in both directions, and says which path it took and why.
 *
 * The words
 *
 *   object   where bytes rest: a file, or a synthetic store ("null:", "pattern:SIZE")
 *   device   where bytes land: "host" or "cuda:N"
 *   extent   "these bytes of this object <-> these bytes of that device's memory"
 *   group    extents of one number, of which a job tells when they have arrived
 *   job      a set of extents on the move
 *   model    the tensors of a safetensors file, or of a folder of them
 *   torch    a file as torch.save writes it, a zip of storages and a pickle
 *   checkpoints   a folder of steps, each with such a file for each rank, and a manifest
 *
 * Simple use: read a whole file into GPU memory
 *
 *	struct pen_error err;
 *	struct pen_device *gpu;
 *	struct pen_object *file;
 *	void *memory;
 *
 *	if (pen_device_open("cuda:0", &gpu, &err) ||
 *	    pen_object_open("weights.bin", PEN_READ, 0, &file, &err) ||
 *	    pen_device_alloc(gpu, pen_object_size(file), &memory, &err))
 *		return fail(&err);
 *
 *	struct pen_extent all = {
 *		.object = file, .memory = memory, .length = pen_object_size(file),
 *	};
 *	if (pen_transfer(PEN_READ, gpu, &all, 1, NULL, NULL, &err))
 *		return fail(&err);
 *
 * Advanced use: many extents in one job, strided slices, progress, cancellation, a report, a
 * memory promise. Read on; each declaration below says what it does and what it costs.
 *
 * Rules that hold everywhere
 *
 *   - A function returns 0, or a negative errno with the words in the pen_error it was given.
 *     Every `struct pen_error *` and every report pointer may be NULL.
 *   - The library never prints, never exits and never raises a signal on outside events. (The
 *     Python package maps files for loads to the host, where one that is cut meanwhile raises
 *     SIGBUS in who looks at it; docs/python.md has the rules, and copy=True the promise.)
 *   - Functions may be called from any thread; one handle is used by one thread at a time, except
 *     pen_job_poll() and pen_job_cancel(), which may be called from any thread while the job lives.
 *     pen_job_cancel() is also safe in a signal handler.
 *   - Structs that may grow start with `size`: set it to sizeof, or use the PEN_..._INIT macros;
 *     everything else zero means "as the library likes". Structs that lie in arrays cannot grow;
 *     they have `reserved` room instead, which must be zero.
 */
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* The version compiled against: in words, in parts, and as one number that only grows, for #if. */
#define PEN_VERSION "0.2.0"
#define PEN_VERSION_MAJOR 0
#define PEN_VERSION_MINOR 2
#define PEN_VERSION_PATCH 0
#define PEN_VERSION_NUMBER \
	(PEN_VERSION_MAJOR * 10000 + PEN_VERSION_MINOR * 100 + PEN_VERSION_PATCH)

/* The version of the library that runs. */
const char *pen_version(void);
int pen_version_number(void);

/* A sized struct, all else zero. C++ has designated initialisers from C++20 only, and compilers
 * warn there of the members that they leave out. */
#ifdef __cplusplus
#define PEN_SIZED_INIT(type) \
	[]() -> type { type pen_sized = type(); pen_sized.size = sizeof(type); return pen_sized; }()
#else
#define PEN_SIZED_INIT(type) { .size = sizeof(struct type) }
#endif

/* ---------------------------------------------------------------------------------- errors -- */

enum pen_domain {
	PEN_DOMAIN_ERRNO,	/* raw is an errno */
	PEN_DOMAIN_CUDA,	/* raw is a CUresult */
	PEN_DOMAIN_CUFILE,	/* raw is a cuFile error */
	PEN_DOMAIN_FORMAT,	/* the bytes are not what they should be; raw is 0 */
};

/* "errno", "cuda", "cufile", "format"; "unknown" for one of a later version. */
const char *pen_domain_name(int domain);

/*
 * What went wrong, filled at the place that knows. All strings are NUL-terminated. They hold names
 * as they are, whatever is in them: show people what pen_error_format() makes of it.
 */
struct pen_error {
	int code;		/* negative errno; what the function returned; 0: no error */
	int domain;		/* enum pen_domain */
	int raw;		/* the code in that domain */
	int64_t offset;		/* byte of the object, or -1 where that means nothing */
	char operation[32];	/* what was attempted: "read", "register memory" ... */
	char object[256];	/* on what: a path, a device; long paths keep their end */
	char message[256];	/* the cause in one sentence */
	char hint[256];		/* what to do about it; may be empty */
};

/*
 * Write "cannot operation object at offset: message. Hint" to `text`, always terminated. Characters
 * that a terminal would obey or not show, and bytes that are no UTF-8, become \x1b, \u202e and the
 * like, so that no name can pass for something else.
 * Returns the length the whole text has, like snprintf.
 */
int pen_error_format(const struct pen_error *err, char *text, size_t size);

/* --------------------------------------------------------------------------------- devices -- */

struct pen_device;

/*
 * Open "host" or "cuda:N". For a GPU this returns at once while the driver and the primary
 * context (the one torch uses) come up in the background; a job that needs the GPU reads ahead
 * meanwhile. An absent driver is reported here; an absent GPU, or an error in the background, by
 * pen_device_ready() and by the first job.
 */
int pen_device_open(const char *name, struct pen_device **device, struct pen_error *err);

/* Wait until the device can take bytes. Never needed; useful to keep start-up out of a timing. */
int pen_device_ready(struct pen_device *device, struct pen_error *err);

const char *pen_device_name(const struct pen_device *device);

/* Memory of the device, aligned to 256 bytes or better; on the host to 2 MiB from 1 MiB on. It is
 * freed with the size that it was allocated with. */
int pen_device_alloc(struct pen_device *device, uint64_t size, void **memory,
		     struct pen_error *err);
int pen_device_free(struct pen_device *device, void *memory, uint64_t size, struct pen_error *err);

/* Plain synchronous copies between device memory and host memory, for small things and checks. */
int pen_device_get(struct pen_device *device, void *host, const void *memory, uint64_t size,
		   struct pen_error *err);
int pen_device_put(struct pen_device *device, void *memory, const void *host, uint64_t size,
		   struct pen_error *err);

/* NULL is allowed. Memory still allocated from it stays valid until the process ends. */
void pen_device_close(struct pen_device *device);

/* --------------------------------------------------------------------------------- objects -- */

struct pen_object;

/* For pen_object_open() and for the direction of a job. */
enum pen_mode {
	PEN_READ = 1,
	PEN_WRITE = 2,		/* a new object; the target changes only at pen_object_commit() */
	PEN_WRITE_IN_PLACE = 3,	/* overwrite the target's own bytes; one that had to be created is
				   removed again if never committed, unless another file has
				   taken its name */
};

/*
 * Open an object:
 *   PATH            a file
 *   null:           reads give zeros, writes vanish
 *   pattern:SIZE    reads give 64-bit little-endian words that state their own offset;
 *                   writes are checked against that and fail with EILSEQ
 *   pattern:SIZE,latency=TIME,rate=BYTES,knee=BYTES
 *                   the same behind a made-up store: each request waits `latency`, all share `rate`
 *                   bytes a second, and beyond `knee` bytes in flight the rate falls by 30 %.
 *                   It may also wish for requests of at least, best and at most so many bytes
 *                   (least=, best=, most=: powers of two from 4 KiB to 1 GiB), want a request
 *                   that failed or fell short sent again whole (whole=1), and after how long
 *                   at first (retry=TIME)
 * `size` is how large a written object will be (space is reserved at once); 0 where not known or
 * for PEN_READ. With PEN_WRITE the bytes go to an unnamed file beside the target; where there is
 * none to be had, to one with a temporary name (".NAME.penstock-NUMBER", NAME cut to 100 bytes). If
 * its writer is killed, the next one in that directory removes it; on file systems that other
 * machines write to as well it stays.
 */
int pen_object_open(const char *name, enum pen_mode mode, uint64_t size,
		    struct pen_object **object, struct pen_error *err);

/* Bytes: of the object when it was opened, or the size given for writing. UINT64_MAX for null:. */
uint64_t pen_object_size(const struct pen_object *object);

/*
 * Make what was written durable and visible under its name: data flushed, put into place, directory
 * flushed. The place is the one that the name led to when the object was opened, through links to
 * their end, wherever the process has gone since.
 *
 * A replaced file's mode, access list (ACL) and extended attributes are kept, and its owner and
 * group as far as the process may give files away; not kept are attributes that vouch for the old
 * bytes (file capabilities, integrity marks). What cannot be kept makes rights narrower, never
 * wider: a set-id bit goes with its owner, another group gets no more than everybody, everybody no
 * more than the group that is lost, and where the access list cannot be read or kept only the
 * owner's rights stay. A new file has the rights of any other that is created there. All that is
 * settled before the file is visible under its name, by the rights that the target has when the
 * bytes are durable; until they are, nobody else can open it.
 *
 * After an error the target is as it was; only if the last step fails it is the new one, and might
 * not survive a power loss. A flush that failed, of the file or of its directory, is never tried
 * again, as it would hide what was lost: open it again and write the bytes anew. In place, it only
 * makes durable what is visible already. A child of fork() cannot commit what its parent opened:
 * -ECHILD.
 */
int pen_object_commit(struct pen_object *object, struct pen_error *err);

/* NULL is allowed. Without a commit, what was written with PEN_WRITE is gone without trace. */
void pen_object_close(struct pen_object *object);

/* --------------------------------------------------------------------------------- digests -- */

/* A number for a chunk of bytes that shows damage; it does not withstand who wants to deceive. */
enum pen_digest_kind {
	PEN_DIGEST_NONE,
	PEN_DIGEST_XXH3,	/* XXH3, 64 bits, seed 0 */
	PEN_DIGEST_CRC32,	/* as zip and gzip have it */
};

/* "xxh3-64", "crc32"; NULL where there is none. */
const char *pen_digest_name(int kind);

/* The digest of bytes in host memory; -EINVAL for a kind that there is not. */
int pen_digest_of(int kind, const void *bytes, size_t length, uint64_t *digest,
		  struct pen_error *err);

/* The CRC32 of two neighbours from the CRC32s of each, without their bytes. */
uint64_t pen_digest_crc32_join(uint64_t first, uint64_t second, uint64_t second_length);

/* ----------------------------------------------------------------------------------- forms -- */

/*
 * How bytes of an object become bytes of memory, on their way: as they are, or number by number in
 * another dtype (enum pen_dtype). The numbers are those that torch's to() gives: the nearest, ties
 * to even, infinite where they are too large; a NaN is a NaN, whatever its payload.
 *
 * On the way to a GPU a kernel does it, which reads the pinned staging memory itself: nothing is
 * staged on the device, and nothing else is needed for it. Where the driver takes no kernel of ours
 * a core does it, and the report says why (`refused`, "kernels").
 */
enum pen_form {
	PEN_FORM_PLAIN,
	PEN_FORM_BF16_TO_F16,
	PEN_FORM_BF16_TO_F32,
	PEN_FORM_F16_TO_BF16,
	PEN_FORM_F16_TO_F32,
	PEN_FORM_F32_TO_BF16,
	PEN_FORM_F32_TO_F16,
	PEN_FORMS
};

/* The form that makes numbers of dtype `to` out of those of `from`; -1 where there is none. */
int pen_form_find(int from, int to);

/* How many bytes of memory `length` bytes of the object become; `length` for what is no form. */
uint64_t pen_form_bytes(int form, uint64_t length);

/* ----------------------------------------------------------------------------------- jobs -- */

/*
 * `length` bytes of `object` from `offset` <-> `length` bytes at `memory`. With rows > 1 it is a
 * strided slice: `rows` rows of `length` bytes, `object_pitch` apart in the object and
 * `memory_pitch` apart in memory. Lengths of 0 are allowed and move nothing. Read extents may
 * overlap in the object; what overlaps in memory is the caller's affair. Extents that overlap
 * in a written object are refused.
 *
 * With a form, `length` and `object_pitch` are of the object, and each row is pen_form_bytes() of
 * `length` in memory, at `memory_pitch`. All that counts bytes of the object must be a multiple of
 * its numbers' size, `memory` and `memory_pitch` of theirs there.
 */
struct pen_extent {
	struct pen_object *object;
	uint64_t offset;
	void *memory;
	uint64_t length;
	uint64_t rows;		/* 0 and 1 both mean one */
	uint64_t object_pitch;
	uint64_t memory_pitch;
	uint64_t group;		/* what pen_job_landed() and its like call it; only with
				   options.groups */
	struct pen_device *device;	/* whose memory it is; NULL: the job's device. One job may
					   mix the host and several GPUs, 32 devices in all */
	uint32_t flags;		/* PEN_FILL, or 0 */
	uint32_t fill;		/* the byte that PEN_FILL writes */
	uint64_t form;		/* enum pen_form: what the bytes of a read become on their way */
	uint64_t reserved[3];
};

/* For a write: `length` times the byte `fill`, with no memory behind it. Padding, mostly: with it a
 * file of many parts is one run of whole blocks. */
#define PEN_FILL 1u

/*
 * How bytes travel. Names and numbers, for people, are gdsio's: pen_transfer_parse() takes "0" or
 * "GPU_DIRECT", pen_transfer_number() gives the 0 back. In here they are one higher, so that zero
 * is PEN_AUTO. PEN_MAPPED is our own and has no number.
 */
enum pen_transfer_type {
	PEN_AUTO,		/* the best path for each range; what people should use */
	PEN_GPU_DIRECT,		/* cuFile, synchronous calls */
	PEN_CPU_ONLY,		/* storage <-> host memory */
	PEN_CPU_GPU,		/* staged in pinned memory, one step after the other */
	PEN_CPU_ASYNC_GPU,	/* staged in pinned memory, overlapped */
	PEN_CPU_CACHED_GPU,	/* through the page cache, staged, overlapped */
	PEN_GPU_DIRECT_ASYNC,	/* cuFile, stream calls */
	PEN_GPU_BATCH,		/* cuFile, batch calls */
	PEN_GPU_BATCH_STREAM,	/* cuFile, stream calls issued in batches */
	PEN_MAPPED,		/* page cache registered with the GPU, no copy by the CPU */
};

/*
 * What a transfer leaves in the page cache. The fastest way from a disk goes around it and leaves
 * nothing behind, so the next read is as slow as the first. AFTER has both: the job takes the
 * fastest way, and once it has ended a background thread of the process reads the same bytes into
 * the page cache; see pen_warming_poll(). It gives way to whoever else uses the disk (a disk that
 * never rests is read a little now and then), ends where memory gets short, and delays neither
 * other jobs nor the end of the process: what is unread then stays cold. Writes leave what their
 * path leaves, unless KEEP or DROP say otherwise.
 *
 * AFTER_UNASKED is the same for programs whose users did not ask for it: it is done only where it
 * hurts nobody, that is, where the bytes fit into half of the memory that is available (limits of
 * control groups counted) and lie on disks of this machine, while those have nothing else to do.
 * The report says whether it is done.
 * People's word for it is "auto"; see pen_cache_parse().
 */
enum pen_cache {
	PEN_CACHE_AUTO,		/* as the path has it: direct reads leave nothing behind */
	PEN_CACHE_KEEP,		/* everything read or written is in the page cache afterwards */
	PEN_CACHE_DROP,		/* nothing of the objects is in the page cache when the job ends */
	PEN_CACHE_AFTER,	/* everything read will be in the page cache some time later */
	PEN_CACHE_AFTER_UNASKED,	/* the same where memory is plentiful; else as AUTO */
};

struct pen_options {
	size_t size;			/* sizeof(struct pen_options) */
	int transfer;			/* enum pen_transfer_type; a type that cannot be had here is
					   refused, never replaced */
	int cache;			/* enum pen_cache */
	uint64_t memory_limit;		/* most pinned memory, at least 64 KiB; 0: 128 MiB;
					   PEN_MEMORY_AUTO */
	uint64_t request_size;		/* bytes of one request, a power of two from 4 KiB to 1 GiB;
					   0: found at run time */
	uint32_t lanes;			/* threads, at most 64; 0: by cores and store */
	uint32_t depth;			/* requests in flight, all lanes; 0: found at run time */
	uint64_t gap;			/* read through holes up to this; 0: 64 KiB, or 16 KiB
					   where the bytes have to come from the disk;
					   UINT64_MAX: none */
	void *stream;			/* a CUstream: the job starts after what it holds, and
					   what is queued on it after pen_job_wait() sees the
					   bytes; NULL: none. The default streams are
					   PEN_STREAM_LEGACY and PEN_STREAM_PER_THREAD */
	const char *inject;		/* faults for tests, see penstock-copy(1); NULL: none */
	uint64_t allocate;		/* for reads: let the job allocate this much memory of
					   the device itself, as soon as that is up, while it
					   reads ahead; the extents' `memory` are then offsets */
	void **allocated;		/* where pen_job_wait() puts that memory, yours to free;
					   NULL after an error */
	uint64_t groups;		/* the extents' groups are below this, and pen_job_landed(),
					   pen_job_gathered() and pen_job_stored() tell as each
					   is complete; 0: nobody asks */
	const struct pen_stream *streams;	/* further streams to start after, of any GPUs */
	size_t stream_count;
	const struct pen_digests *digests;	/* objects whose chunks are to be digested as they
						   pass; NULL: none */
	size_t digest_count;
};

/*
 * For a write with options.groups, so that nothing waits for the store: as much memory as its bytes
 * take, if that is plentiful, which is half of what the machine and the control groups of the
 * process have available. Where it is not, what is plentiful, and the rest streams. For any other
 * job it is as 0.
 *
 * A write with groups leaves its memory to the next one, since making it takes longer than filling
 * it; pen_trim() gives it back. What is kept is what the last of them used, and up to a quarter
 * more.
 */
#define PEN_MEMORY_AUTO UINT64_MAX

/* What is queued on this stream of this GPU comes before all of the job; see options.stream. */
struct pen_stream {
	struct pen_device *device;
	void *stream;
	uint64_t reserved[2];
};

/*
 * Digests of an object's chunks, looked at as they pass, in reads and in writes. Chunk i is the
 * object's bytes from i * chunk on; the last one ends with the object. The tables are the caller's,
 * live until pen_job_wait(), and are the same in whatever order the bytes came.
 *
 * Where the parts of an object matter, `cuts` are further places at which a chunk ends and the next
 * begins: then the chunk of a byte is its offset / chunk plus how many cuts are not above it.
 */
struct pen_digests {
	struct pen_object *object;
	uint64_t chunk;		/* bytes, a power of two from 64 KiB to 16 MiB; must fit into a
				   request: options.request_size, half of options.memory_limit */
	uint64_t count;		/* entries of the tables; chunks beyond are not digested */
	uint64_t *values;
	unsigned char *states;	/* enum pen_chunk; entries of chunks that are not touched stay as
				   they are */
	int kind;		/* enum pen_digest_kind */
	uint32_t flags;		/* 0 */
	const uint64_t *cuts;	/* ascending, none of them a multiple of `chunk`; NULL: none */
	size_t cut_count;
	uint64_t reserved[2];
};

enum pen_chunk {
	PEN_CHUNK_UNTOUCHED,	/* nothing of it was moved */
	PEN_CHUNK_DIGESTED,	/* all of it passed, and its digest is in `values` */
	PEN_CHUNK_UNVERIFIED,	/* only a part was moved, or by a path on which no core sees the
				   bytes (gds, cufile-compat, mapped); auto takes none of these
				   where digests are asked for */
};

/* The default stream of a context has no handle of its own; these name it, as CUDA's do. */
#define PEN_STREAM_LEGACY ((void *)1)
#define PEN_STREAM_PER_THREAD ((void *)2)

#define PEN_OPTIONS_INIT PEN_SIZED_INIT(pen_options)

#define PEN_PATHS_MAX 12
#define PEN_REASON_MAX 200

/* A path that carried bytes, or one that could not be had, and why. */
struct pen_path {
	char path[24];
	uint64_t bytes;
	char reason[PEN_REASON_MAX];
	uint64_t reserved[2];
};

/* What a job did. */
struct pen_report {
	size_t size;			/* sizeof(struct pen_report) */
	uint64_t bytes;			/* that arrived in memory, or in the object */
	uint64_t storage_bytes;		/* that crossed the store: with gaps and alignment */
	double seconds;			/* wall time, start to end, everything included */
	double setup_seconds;		/* of these, before the device could take its first byte */
	double gb_per_s;		/* bytes / seconds / 10^9 */
	double cpu_seconds;		/* user + system time of the job's threads */
	uint64_t pinned_bytes;		/* most staging memory held at once, and what cores need
					   that do a GPU's work */
	char device[32];
	uint32_t lanes;			/* threads that moved bytes */
	uint64_t requests;
	uint64_t retries;
	uint64_t request_size;		/* what the store was found to like, last used */
	uint32_t depth;			/* and in flight; 0: nothing was to be found */
	double latency_us_p50, latency_us_p95, latency_us_p99, latency_us_max;
	uint32_t path_count, refused_count;
	struct pen_path paths[PEN_PATHS_MAX];
	struct pen_path refused[PEN_PATHS_MAX];
	uint64_t digested_bytes;	/* of the objects in options.digests: in chunks that have a
					   digest now ... */
	uint64_t unverified_bytes;	/* ... and bytes that were moved without */
	uint64_t warming_bytes;		/* that will be brought into the page cache from now on */
	char cache_reason[PEN_REASON_MAX];	/* what becomes of bytes that were read around the
						   page cache, and why; "": there were none */
	int gathering;			/* enum pen_gathering */
	double gathered_seconds;	/* of a write with options.groups: from the start until all
					   of its memory might change again */
	double stored_seconds;		/* of a write: until all was with the object, not yet
					   durable */
	uint64_t made_bytes;		/* staging memory that had to be made; the rest of
					   pinned_bytes was there from earlier jobs */
	uint64_t delivered_bytes;	/* what `bytes` are in memory: more or fewer where they were
					   decoded or their form changed */
	uint64_t coded_bytes;		/* of `bytes`, those that were decoded on their way */
	double decode_seconds;		/* that lanes took to decode, all together; what a GPU
					   takes is part of moving the bytes, and not in it */
	uint64_t device_staging_bytes;	/* most memory of GPUs that was staged in: always 0, since
					   they read the host's by themselves */
	uint64_t core_decoded_bytes;	/* of coded_bytes, those that lanes decoded; the others a
					   GPU did */
};

/* How a write with options.groups took its bytes from memory. */
enum pen_gathering {
	PEN_GATHERING_NONE,		/* nobody asked */
	PEN_GATHERING_AHEAD,		/* all of it found room in staging memory: nothing waited
					   for the store */
	PEN_GATHERING_STREAMED,		/* some had to wait until the store had taken others */
};

#define PEN_REPORT_INIT PEN_SIZED_INIT(pen_report)

enum pen_state {
	PEN_PLANNED,
	PEN_RUNNING,
	PEN_DRAINING,	/* failed or cancelled; what is in flight comes home */
	PEN_DONE,
	PEN_FAILED,
	PEN_CANCELLED,
};

struct pen_progress {
	int state;		/* enum pen_state */
	uint64_t bytes;		/* moved so far */
	uint64_t total;
	double seconds;		/* since the start */
};

struct pen_job;

/*
 * Plan and start. Everything that can be refused - overlapping writes, ranges beyond the end, a
 * memory limit too small, a transfer type this machine cannot do - is refused here, before any
 * I/O. Objects, device and memory must live until pen_job_wait(); `extents` need not. Several jobs
 * may read one object at the same time, or write to different bytes of it.
 */
int pen_job_start(enum pen_mode direction, struct pen_device *device,
		  const struct pen_extent *extents, size_t count,
		  const struct pen_options *options, struct pen_job **job, struct pen_error *err);

void pen_job_poll(struct pen_job *job, struct pen_progress *progress);

/* Ask the job to stop; pen_job_wait() then returns -ECANCELED unless it was done already. */
void pen_job_cancel(struct pen_job *job);

/*
 * Wait for the end, but not longer than `seconds`; 0 when the job has ended (pen_job_wait() will
 * return at once), -ETIMEDOUT otherwise. For loops that show progress.
 */
int pen_job_wait_for(struct pen_job *job, double seconds);

/*
 * For a job with options.groups: put up to `room` groups of which all bytes have come so far into
 * `groups`, each once, in the order in which they became complete, waiting up to `seconds` for the
 * first. Returns how many; 0 when none came in time, or the job has ended and all were told. One
 * thread at a time for each of the three.
 *
 *   landed     of a read: all is in memory. Work queued on any stream afterwards sees the bytes.
 *   gathered   of a write: all has been taken, and the memory may change again. By paths that
 *              stage the job gathers ahead of the store as far as options.memory_limit allows;
 *              by cuFile it is with the store at the same moment.
 *   stored     of a write: all is with the object; durable only after pen_object_commit().
 */
size_t pen_job_landed(struct pen_job *job, uint64_t *groups, size_t room, double seconds);
size_t pen_job_gathered(struct pen_job *job, uint64_t *groups, size_t room, double seconds);
size_t pen_job_stored(struct pen_job *job, uint64_t *groups, size_t room, double seconds);

/*
 * For event loops: a descriptor to wait on with poll(2), epoll(7) and the like, or a negative
 * errno. It is an eventfd(2), non-blocking and closed by exec, and the same one whenever asked for.
 *
 * It becomes readable when a group is complete (landed, gathered or stored; with options.groups)
 * and when the job has ended, well or badly; at once where that was so before the first call. It
 * stays so until 8 bytes are read from it, whose value means nothing. Whatever comes after the
 * reading makes it readable again, and there may be nothing new by then; so, when it is readable,
 * in this order and without waiting: read it; ask pen_job_wait_for(job, 0), which is 0 once the job
 * has ended; ask pen_job_landed() or its like until they return 0; if the job had ended, that was
 * all.
 *
 * It belongs to the job, and pen_job_wait() closes it: take it out of the loop before. A child of
 * fork() shares it and must not read it; a call there is -ECHILD.
 */
int pen_job_eventfd(struct pen_job *job, struct pen_error *err);

/*
 * Wait for the end, release the job, tell how it went. For a read the bytes are in memory; for a
 * write they are with the object, durable only after pen_object_commit(). The report is filled
 * in either case; one whose size is not set is refused with -EINVAL, and the job lives on.
 */
int pen_job_wait(struct pen_job *job, struct pen_report *report, struct pen_error *err);

/* Start and wait in one. */
int pen_transfer(enum pen_mode direction, struct pen_device *device,
		 const struct pen_extent *extents, size_t count, const struct pen_options *options,
		 struct pen_report *report, struct pen_error *err);

/* ------------------------------------------------------------------------- the page cache -- */

/* What the background thread of PEN_CACHE_AFTER does, for all jobs of the process together. */
struct pen_warming {
	size_t size;			/* sizeof(struct pen_warming) */
	uint64_t left;			/* bytes that it has yet to look at; 0: it is idle */
	uint64_t brought;		/* bytes that it has read into the page cache so far */
	uint64_t given_up;		/* bytes that it will not bring in ... */
	char reason[PEN_REASON_MAX];	/* ... and why not, of the last; "": there are none */
};

#define PEN_WARMING_INIT PEN_SIZED_INIT(pen_warming)

void pen_warming_poll(struct pen_warming *warming);

/* Wait until nothing is left, but not longer than `seconds`; 0, or -ETIMEDOUT. */
int pen_warming_wait(double seconds);

/* Give up what is left. Returns at once; the thread ends with the few MiB that it is at. */
void pen_warming_stop(void);

/* ---------------------------------------------------------------------------------- models -- */

/* The kinds of numbers that safetensors knows, by its own names; see pen_dtype_name(). */
enum pen_dtype {
	PEN_BOOL, PEN_F4, PEN_F6_E2M3, PEN_F6_E3M2, PEN_U8, PEN_I8, PEN_F8_E5M2, PEN_F8_E4M3,
	PEN_F8_E8M0, PEN_F8_E4M3FNUZ, PEN_F8_E5M2FNUZ, PEN_I16, PEN_U16, PEN_F16, PEN_BF16,
	PEN_I32, PEN_U32, PEN_F32, PEN_C64, PEN_F64, PEN_I64, PEN_U64,
	PEN_DTYPES
};

/* "BF16" for PEN_BF16; NULL where there is none. And the bits of one element: 4 to 64. */
const char *pen_dtype_name(int dtype);
unsigned int pen_dtype_bits(int dtype);

struct pen_tensor {
	const char *name;
	int dtype;			/* enum pen_dtype */
	uint32_t rank;
	const uint64_t *shape;		/* `rank` numbers, the last one contiguous */
	uint64_t bytes;
	uint32_t file;			/* index into pen_model_files() */
	uint64_t offset;		/* of its first byte in that file */
	size_t name_length;		/* a name may hold a NUL, and has one after its end */
	uint64_t coded;			/* bytes that it has in the file, where it is coded: see
					   pen_pack_start(); 0: it lies there as it is */
	uint64_t reserved[2];
};

struct pen_metadata {
	const char *key, *value;
	size_t key_length, value_length;	/* they may hold a NUL */
	uint64_t reserved[2];
};

struct pen_model_file {
	const char *path;		/* as it can be opened */
	const char *name;		/* as the index has it: the path without the folder; as
					   given to pen_model_open_files() */
	uint64_t size;
	uint64_t data;			/* where the header ends and the tensors begin */
	size_t metadata_count;
	const struct pen_metadata *metadata;	/* NULL: the file has none, not even an empty one */
	struct pen_object *object;	/* open for reading, closed with the model */
	uint64_t original;		/* bytes that it had before it was packed; 0: it was not */
	uint64_t reserved[3];
};

struct pen_model;

/*
 * Find the tensors of a model; only headers are read. `path` is
 *   - a .safetensors file;
 *   - a folder with an index (model.safetensors.index.json, or the only *.safetensors.index.json):
 *     the files that it names. A shard that is missing, a tensor that is listed but not there and a
 *     path that leaves the folder are errors;
 *   - a folder without an index: all its *.safetensors files; a tensor that two of them have is an
 *     error;
 *   - an index file.
 * A damaged file is refused with words that say what is wrong and where (PEN_DOMAIN_FORMAT).
 */
int pen_model_open(const char *path, struct pen_model **model, struct pen_error *err);

/*
 * The same for .safetensors files that the caller lists: one model of all their tensors, the files
 * in the order of the list and named as in it. A tensor that two of them have is an error.
 */
int pen_model_open_files(const char *const *paths, size_t count, struct pen_model **model,
			 struct pen_error *err);

/* NULL is allowed. Wait for jobs that load from it first; loaded tensors are not touched. */
void pen_model_close(struct pen_model *model);

/*
 * The tensors in the order of files and offsets, of a coded file those of its original; and how
 * many there are.
 */
size_t pen_model_tensors(const struct pen_model *model, const struct pen_tensor **tensors);
size_t pen_model_files(const struct pen_model *model, const struct pen_model_file **files);

/* What is odd but no error, in words: a tensor that the index does not list, for instance. */
size_t pen_model_warnings(const struct pen_model *model, const char *const **warnings);

/* By name; NULL if it has none of that name. The second for names that may hold a NUL. */
const struct pen_tensor *pen_model_find(const struct pen_model *model, const char *name);
const struct pen_tensor *pen_model_find_name(const struct pen_model *model, const char *name,
					     size_t length);

/* A tensor, or a box cut out of it, and where it goes: contiguous, the last dimension first. */
struct pen_placement {
	const struct pen_tensor *tensor;
	const uint64_t *start, *stop;	/* `rank` numbers each: start <= index < stop in every
					   dimension; both NULL: all of it */
	void *memory;
	struct pen_device *device;	/* whose memory it is; NULL: that of the load */
	uint64_t form;			/* enum pen_form, from the tensor's dtype: what it becomes
					   on its way. Not for a tensor whose offset in the file is
					   no multiple of its numbers' size */
	uint64_t reserved[2];
};

/* Bytes of memory that a placement fills; refuses a box that leaves the tensor or cuts a byte in
 * two, and a form that is not for its dtype. */
int pen_placement_bytes(const struct pen_placement *placement, uint64_t *bytes,
			struct pen_error *err);

/*
 * Lay placements out in one piece of memory, one after the other, each aligned to 256 bytes: sets
 * `memory` of each to its offset, and `total` to the size of the whole. For options.allocate.
 */
int pen_placement_layout(struct pen_placement *placements, size_t count, uint64_t *total,
			 struct pen_error *err);

/*
 * Start to load. Only the bytes of the boxes are asked for; neighbours are read together. The
 * groups of the job (options.groups) are the indices of the placements.
 */
int pen_load_start(struct pen_model *model, struct pen_device *device,
		   const struct pen_placement *placements, size_t count,
		   const struct pen_options *options, struct pen_job **job,
		   struct pen_error *err);

/* ----------------------------------------------------------------------------- torch files -- */

/*
 * What torch.save writes is a zip file: a pickle, "data.pkl", that describes objects, and beside it
 * one record for each storage, "data/0" and so on, as plain bytes. Penstock reads and writes such
 * files; docs/torch-file.md says what lies where in those that it writes. Nothing is unpickled: no
 * function of this library runs what a pickle names.
 *
 * Load: open the file, make extents of records (`offset` and `bytes` of pen_torch_object()), run a
 * job. With a check in its options the bytes are verified as they pass:
 *
 *	pen_torch_open("state.pt", &file, &err);
 *	pen_torch_check_new(file, &options, &check, &err);
 *	options.digests = pen_torch_check_digests(check);
 *	options.digest_count = 1;
 *	pen_transfer(PEN_READ, gpu, extents, count, &options, &report, &err);
 *	pen_torch_check_end(check, NULL, &err);
 */
struct pen_torch;

struct pen_torch_record {
	const char *name;		/* without the archive's: "data.pkl", "data/0" */
	uint64_t offset;		/* of its first byte in the file */
	uint64_t bytes;			/* in the file */
	uint32_t crc32;			/* 0: the writer left it out */
	uint32_t flags;			/* PEN_TORCH_PACKED, or 0 */
	uint64_t reserved[4];
};

/* A record that is compressed: nothing that torch.load needs; Penstock does not read it. */
#define PEN_TORCH_PACKED 1u

struct pen_torch_tensor {
	const char *name;		/* keys and indices on the way to it: "model.layers.0.w" */
	size_t name_length;		/* it may hold a NUL, and has one after its end */
	const char *type;		/* torch's name of its dtype, "float32", "quint8" */
	int dtype;			/* enum pen_dtype, or -1 where safetensors has no such */
	uint32_t item_bits;		/* of one element */
	uint32_t rank;
	const uint64_t *shape;		/* `rank` numbers, in elements */
	const uint64_t *stride;		/* likewise */
	uint64_t bytes;			/* of all elements, as if they lay side by side */
	uint64_t offset;		/* of its first element in the file */
	size_t record;			/* its storage, index into pen_torch_records() */
	const char *location;		/* where that was when it was saved: "cpu", "cuda:0";
					   "" where the pickle does not say */
	uint64_t reserved[3];
};

/*
 * Open a file of torch's for reading: its directory is read, and every record in it checked: it
 * lies in the file, has the local header that the directory promises, and shares no byte with
 * another. What is not so is refused with words (-EBADMSG, PEN_DOMAIN_FORMAT); so is a storage that
 * is compressed. A file in the format before zip is refused, too: torch reads these.
 */
int pen_torch_open(const char *path, struct pen_torch **file, struct pen_error *err);

/*
 * The same for one item of a file of several, which is open as `object`: `size` bytes from `offset`
 * on are a zip of torch's. Offsets of records and tensors are those of the object, which must stay
 * open.
 */
int pen_torch_open_item(struct pen_object *object, uint64_t offset, uint64_t size,
			struct pen_torch **file, struct pen_error *err);

/* NULL is allowed. Wait for jobs that load from it first. */
void pen_torch_close(struct pen_torch *file);

/* The file's bytes, for extents; closed with it, unless it is an item of a file. */
struct pen_object *pen_torch_object(const struct pen_torch *file);

/* All records in the order of offsets; and how many there are. */
size_t pen_torch_records(const struct pen_torch *file, const struct pen_torch_record **records);

/* By name; NULL if there is none of that name. */
const struct pen_torch_record *pen_torch_find(const struct pen_torch *file, const char *name);

/* Read a small record, all of it, into `bytes`; its CRC32 is verified (-EILSEQ). */
int pen_torch_read(const struct pen_torch *file, const struct pen_torch_record *record,
		   void *bytes, struct pen_error *err);

/*
 * The tensors that the pickle describes, in its order; found by reading it as data. Dicts, lists
 * and tuples are walked; of other objects the arguments and the state. One tensor under two names
 * is there twice. Those without a storage (on "meta", say) are not. A pickle that is damaged, too
 * deep or too large, and a tensor that leaves its storage, are refused. The list lives as long as
 * the file.
 */
int pen_torch_tensors(struct pen_torch *file, const struct pen_torch_tensor **tensors,
		      size_t *count, struct pen_error *err);

struct pen_torch_check;

/* What a check has found; all counts are bytes of storages. */
struct pen_torch_checked {
	size_t size;			/* sizeof(struct pen_torch_checked) */
	uint64_t verified;		/* passed, and are as they were saved */
	uint64_t unverified;		/* passed, but their chunk or record did not pass whole, or
					   no core saw them, or the file has no digest of them */
	int by;				/* what the file has: PEN_TORCH_BY_... */
};

enum pen_torch_by {
	PEN_TORCH_BY_NOTHING,		/* saved without CRC32s */
	PEN_TORCH_BY_CRC32,		/* the zip's: a storage is verified if it passed whole */
	PEN_TORCH_BY_TABLE,		/* Penstock's own digests, chunk by chunk */
};

#define PEN_TORCH_CHECKED_INIT PEN_SIZED_INIT(pen_torch_checked)

/* What a file has to verify its storages by: enum pen_torch_by. */
int pen_torch_verifiable(const struct pen_torch *file);

/*
 * Verify what one job with these options (NULL is allowed) reads of the file: what
 * pen_torch_check_digests() gives, one struct, goes into the job's options. After pen_job_wait()
 * pen_torch_check_end() compares and releases the check. A mismatch is -EILSEQ, and the words name
 * the file, the storage or a tensor in it, and the first byte of the chunk that is wrong. `checked`
 * may be NULL; it is filled in either case. Call it after a job that failed, too; then its result
 * means nothing.
 */
int pen_torch_check_new(struct pen_torch *file, const struct pen_options *options,
			struct pen_torch_check **check, struct pen_error *err);

/* The same for what a job reads of items of one object, in the order of their offsets. */
int pen_torch_check_items(struct pen_torch *const *files, size_t count,
			  const struct pen_options *options, struct pen_torch_check **check,
			  struct pen_error *err);

const struct pen_digests *pen_torch_check_digests(const struct pen_torch_check *check);
int pen_torch_check_end(struct pen_torch_check *check, struct pen_torch_checked *checked,
			struct pen_error *err);

/*
 * Verify a whole file where it lies: the CRC32 of every record, and the digests that it has. Reads
 * it once, through host memory, by a job with `options` (NULL is allowed). `checked` as above.
 */
int pen_torch_verify(struct pen_torch *file, const struct pen_options *options,
		     struct pen_torch_checked *checked, struct pen_error *err);

/* One storage of a file that is written. */
struct pen_torch_storage {
	const void *memory;
	uint64_t bytes;
	struct pen_device *device;	/* whose memory it is; NULL: that of the save */
	const char *key;		/* its record is "data/KEY"; NULL: its index, in decimal */
	uint64_t group;			/* as in an extent; only with options.groups */
	uint64_t reserved[3];
};

/* A small record of a file that is written: the caller's bytes under the caller's name. */
struct pen_torch_part {
	const char *name;		/* "data.pkl", "byteorder", ... */
	const void *bytes;
	size_t length;
	uint64_t reserved[2];
};

struct pen_torch_content {
	size_t size;			/* sizeof(struct pen_torch_content) */
	const struct pen_torch_part *parts;	/* what torch.load wants: data.pkl. "byteorder" and
						   "version" are added where they are missing */
	size_t part_count;
	const struct pen_torch_storage *storages;
	size_t storage_count;
	const char *archive;		/* the folder in the zip; NULL: the file's name, as torch */
};

#define PEN_TORCH_CONTENT_INIT PEN_SIZED_INIT(pen_torch_content)

struct pen_torch_save;

/*
 * Start to write a file that torch.load opens, storages at multiples of 4096 but for small ones,
 * which are packed, with true CRC32s and a table of digests, made of the bytes as they pass. It is
 * written as any object with PEN_WRITE: the target changes at pen_torch_save_wait(), all at once,
 * or not at all. The contents but for the storages' memory may go after this call; memory and
 * devices must live until the end, or until a group is told as gathered. options.digests must be
 * empty; options.allocate is for reads.
 */
int pen_torch_save_start(const char *path, struct pen_device *device,
			 const struct pen_torch_content *content,
			 const struct pen_options *options, struct pen_torch_save **save,
			 struct pen_error *err);

/*
 * Something of a file of several, as torch.distributed.checkpoint writes them: a zip of its own,
 * which torch.load reads as if it were alone, or bytes.
 */
struct pen_torch_item {
	const void *bytes;		/* its data.pkl */
	size_t length;
	const struct pen_torch_storage *storages;	/* named by their index: no keys */
	size_t storage_count;
	uint32_t flags;			/* PEN_TORCH_RAW, or 0 */
	uint64_t offset, size;		/* where it will be in the file; set when the save starts */
	uint64_t reserved[2];
};

/* `bytes` are all of the item, and lie in the file as they are. */
#define PEN_TORCH_RAW 1u

/*
 * Start to write a file of `count` items, one after the other, at least one. Otherwise it is like
 * pen_torch_save_start(), and what follows is the same for both.
 */
int pen_torch_pack_start(const char *path, struct pen_device *device,
			 struct pen_torch_item *items, size_t count,
			 const struct pen_options *options, struct pen_torch_save **save,
			 struct pen_error *err);

/*
 * The job that moves the storages: to poll, to cancel, to wait for with a limit, to ask for groups.
 * Never give it to pen_job_wait(). What is left to do when it is done is small.
 */
struct pen_job *pen_torch_save_job(const struct pen_torch_save *save);

/*
 * Wait until the memory of all storages may change again, but not longer than `seconds`: 0 when it
 * may, -ETIMEDOUT, or -ECANCELED when the job has ended badly before; pen_torch_save_wait() tells
 * why. Work queued on any stream afterwards may overwrite what was saved, and the memory may be
 * freed. With options.groups that is as soon as the bytes are in staging memory, which
 * options.memory_limit bounds; without, when they are with the object. One thread at a time, and
 * not beside pen_job_gathered().
 */
int pen_torch_save_gathered(struct pen_torch_save *save, double seconds);

/*
 * Wait until the bytes have moved, write what had to wait for them - headers, table, directory -
 * commit, release. 0: the file is durable and visible. After an error, or pen_job_cancel(), the
 * target is as it was, with the exception that pen_object_commit() has. The report is of all of it,
 * commit included. Bytes that no core saw on their way (PEN_GPU_DIRECT and its like) are read back
 * from the file to have their CRC32s, and stay counted as unverified_bytes: these sums vouch for
 * the file from then on, not for the way there.
 */
int pen_torch_save_wait(struct pen_torch_save *save, struct pen_report *report,
			struct pen_error *err);

/* ---------------------------------------------------------------------------------- saving -- */

/* A tensor to be saved: its numbers one after the other, the last dimension first. */
struct pen_save_tensor {
	const char *name;		/* UTF-8 */
	size_t name_length;		/* for one that holds a NUL; 0: up to its NUL */
	int dtype;			/* enum pen_dtype */
	uint32_t rank;
	const uint64_t *shape;		/* `rank` numbers */
	void *memory;
	struct pen_device *device;	/* whose memory it is; NULL: the host's */
	uint32_t file;			/* below options.file_count, where that is given */
	uint64_t reserved[4];
};

struct pen_save_options {
	size_t size;			/* sizeof(struct pen_save_options) */
	uint64_t align;			/* the first tensor of a file begins at a multiple of this,
					   for which the header is filled up with spaces: a power of
					   two from 8 to 1 MiB. 0: 8, and the file has the very
					   bytes that the safetensors package writes; with 4096 the
					   tensors' bytes lie as the disk wants them */
	const struct pen_metadata *metadata;	/* for each file, keys once, lengths of 0 as with
						   names; NULL: none, not even an empty one */
	size_t metadata_count;
	uint64_t shard_size;		/* a folder of files of at most so many bytes of tensors,
					   cut and named as the Hugging Face libraries do it, with
					   an index where there are several; 0: one file */
	size_t file_count;		/* instead of shard_size a folder of so many files, in
					   which the tensors lie as `file` of each says */
	const char *const *files;	/* their names; NULL: as with shard_size */
	const struct pen_options *transfer;	/* how the bytes travel; NULL: as the library likes.
						   Tensors of several devices are one job: name what
						   must come first in its `streams` */
	int coded;			/* the files are coded: the very bytes that packing them
					   would give, see pen_pack_start(). Of `transfer` only the
					   memory limit and the streams mean something then */
};

#define PEN_SAVE_OPTIONS_INIT PEN_SIZED_INIT(pen_save_options)

/*
 * Save tensors as a safetensors file - `path` - or as a folder of them, which must be there: see
 * the options. Header and tensors of all devices and files are one job. Everything that can be
 * refused is refused here: names that come twice, a shape that is too large, a disk that is too
 * small. Memory and devices must live until pen_save_wait(), all else need not.
 *
 *	struct pen_save_tensor weight = { .name = "weight", .dtype = PEN_F32, .rank = 2,
 *					  .shape = shape, .memory = memory, .device = gpu };
 *	struct pen_save *save;
 *
 *	if (pen_save_start("model.safetensors", &weight, 1, NULL, &save, &err) ||
 *	    pen_save_wait(save, NULL, &err))
 *		return fail(&err);
 *
 * What is promised of one file is what pen_object_commit() promises. Of a folder: all files are
 * durable before the first gets its name, and the index comes last. An error leaves the old model.
 * Who follows the index finds the old model or the new one, whole, at every instant, through a kill
 * and a power loss; meanwhile old files may have second names (NAME.penstock-NUMBER.safetensors).
 * At the end those go, and with them files of an older model (model*.safetensors) that the new one
 * does not have; after a kill, with the next save. Only where a file system has no links, or files
 * are links themselves, they are replaced as they come.
 */
struct pen_save;
int pen_save_start(const char *path, const struct pen_save_tensor *tensors, size_t count,
		   const struct pen_save_options *options, struct pen_save **save,
		   struct pen_error *err);

/* As with jobs, and as safe in other threads and in signal handlers. What is cancelled before
 * pen_save_wait() begins to give names changes nothing. */
void pen_save_poll(struct pen_save *save, struct pen_progress *progress);
void pen_save_cancel(struct pen_save *save);

/* 0 when all bytes have been written (pen_save_wait() then has to make them durable); -ETIMEDOUT
 * when `seconds` have passed. The memory may change again from then on. */
int pen_save_wait_for(struct pen_save *save, double seconds);

/* Wait, commit, release. The report is that of the job, without the commit; of a coded save `bytes`
 * are those in the files, and `delivered_bytes` those that they had without coding. */
int pen_save_wait(struct pen_save *save, struct pen_report *report, struct pen_error *err);

/* What a save would write, without writing it: for who makes the bytes as they go. */
struct pen_layout_file {
	const char *name;		/* in its folder, that of options.files where given; NULL
					   where there is no folder */
	const void *header;		/* everything before the first tensor */
	uint64_t header_size;
	uint64_t size;			/* of the whole file */
	const size_t *tensors;		/* numbers of its tensors, as they lie */
	size_t tensor_count;
	uint64_t reserved[4];
};

/* Where a tensor lies. */
struct pen_layout_place {
	uint64_t file, offset, bytes;
};

struct pen_layout {
	const struct pen_layout_file *files;
	size_t file_count;
	const struct pen_layout_place *places;	/* one for each tensor, in the caller's order */
	uint64_t bytes;			/* of all tensors */
	const char *index;		/* of a folder: the text of its index, which several files
					   need, with a NUL after its end; NULL otherwise */
	size_t index_size;
};

/* The tensors' memory is not looked at. Release with pen_layout_free(), which takes NULL. */
int pen_layout_make(const struct pen_save_tensor *tensors, size_t count,
		    const struct pen_save_options *options, struct pen_layout **layout,
		    struct pen_error *err);
void pen_layout_free(struct pen_layout *layout);

/* ----------------------------------------------------------------------------- checkpoints -- */

/*
 * A folder of checkpoints has a folder for each step, in which each rank has a file as torch.save
 * writes it, and a manifest that names these files:
 *
 *	DIR/step-00001200/rank-00000.pt
 *	DIR/step-00001200/manifest.json
 *	DIR/.penstock.lock
 *
 * The manifest is written last. A step exists when its manifest is there: before, there is nothing
 * that anybody takes for a checkpoint; afterwards, all of it is durable. docs/checkpoint-folder.md
 * has the format. What a writer does, once for each rank and in this order:
 *
 *	pen_checkpoints_open(dir, PEN_WRITE, rank, &folder, &err);
 *	pen_checkpoints_begin(folder, step, world_size, 0, &path, &err);   rank 0 before the others
 *	pen_torch_save_start(path, ...), pen_torch_save_wait(...);
 *	pen_checkpoints_describe(folder, &file, &err);
 *	pen_checkpoints_commit(folder, files, world_size, "{}", &err);   rank 0, of all files
 *
 * A folder has one writer: rank 0 holds a lock on DIR/.penstock.lock (flock), from opening to
 * closing. A second one is refused, -EBUSY, with words that name the process and its machine. The
 * other ranks have no lock; they write into a step that rank 0 began. A forked child has no part
 * in the lock, and cannot write: -ECHILD. Readers need no lock: a step that is removed while they
 * look at it is simply not there.
 *
 * pen_checkpoints_list(), _show(), _latest(), _verify(), _check(), _path() and _warning() may be
 * called from several threads at once, also while another one writes.
 */
struct pen_checkpoints;

enum pen_checkpoint_state {
	PEN_CHECKPOINT_WHOLE,		/* its manifest is right, its files are there and have the
					   sizes that it says */
	PEN_CHECKPOINT_DAMAGED,		/* there is a manifest, but not all that it promises */
	PEN_CHECKPOINT_UNFINISHED,	/* there is none: it is being written, or was when its
					   writer was stopped; pen_checkpoints_sweep() knows */
};

/* The file of one rank. */
struct pen_checkpoint_file {
	char name[32];			/* in the folder of its step */
	uint64_t bytes;
	uint64_t tensors;
	char digest[32];		/* "xxh3:" and 16 digits: of the places, sizes and CRC32s of
					   all its records */
	uint64_t reserved[4];
};

/* What a manifest says; of steps that are not whole, what can be said. */
struct pen_checkpoint {
	uint64_t step;
	int state;			/* enum pen_checkpoint_state */
	uint32_t world_size;		/* ranks; 0: not known, as all that follows */
	uint64_t bytes;			/* of all its files */
	char time[24];			/* of the commit: "2026-11-17T02:30:00Z" */
	const struct pen_checkpoint_file *files;	/* one for each rank, in their order */
	size_t file_count;
	const char *user;		/* the caller's own values, a JSON object, with a NUL */
	size_t user_length;
	char problem[256];		/* why it is not whole; "" where it is */
	uint64_t reserved[4];
};

struct pen_checkpoint_list {
	const struct pen_checkpoint *steps;	/* ascending */
	size_t count;
};

/*
 * Open a folder of checkpoints: with PEN_READ to look at it, with PEN_WRITE to write as this rank
 * (`rank` means nothing to a reader). Rank 0 creates the folder where it is missing, with those
 * above it, and takes the lock. Where the file system has no locks it goes on without, and
 * pen_checkpoints_warning() says so: then it is yours to see that nobody else writes there.
 */
int pen_checkpoints_open(const char *path, enum pen_mode mode, uint32_t rank,
			 struct pen_checkpoints **folder, struct pen_error *err);

/* NULL is allowed. A step that was begun and not committed is abandoned. */
void pen_checkpoints_close(struct pen_checkpoints *folder);

/* Its absolute path; and what is odd but no error, in words, or "". */
const char *pen_checkpoints_path(const struct pen_checkpoints *folder);
const char *pen_checkpoints_warning(const struct pen_checkpoints *folder);

/* All steps, whatever their state. Release with pen_checkpoint_list_free(), which takes NULL. */
int pen_checkpoints_list(struct pen_checkpoints *folder, struct pen_checkpoint_list **list,
			 struct pen_error *err);
void pen_checkpoint_list_free(struct pen_checkpoint_list *list);

/* The last step that is whole; -ENOENT where there is none. */
int pen_checkpoints_latest(struct pen_checkpoints *folder, uint64_t *step, struct pen_error *err);

/* One step, which must be whole: -ENOENT if there is none, -EBADMSG with words if it is damaged.
 * Release with pen_checkpoint_free(), which takes NULL. */
int pen_checkpoints_show(struct pen_checkpoints *folder, uint64_t step,
			 struct pen_checkpoint **checkpoint, struct pen_error *err);
void pen_checkpoint_free(struct pen_checkpoint *checkpoint);

/* For pen_checkpoints_begin(): a step that is there is replaced at the commit, not before. */
#define PEN_CHECKPOINT_OVERWRITE 1u

/*
 * Begin to save a step: its folder is there, and durable. `path` is the file that this rank is to
 * write, with PEN_WRITE; it lives until the next call of this function. A step that exists is
 * refused, -EEXIST, or replaced: then the files have new names, and the old ones go after the
 * commit. Rank 0 begins first; what a crash left in the folder of this step goes then.
 */
int pen_checkpoints_begin(struct pen_checkpoints *folder, uint64_t step, uint32_t world_size,
			  uint32_t flags, const char **path, struct pen_error *err);

/* What this rank has written, for the commit: read from the file itself. */
int pen_checkpoints_describe(struct pen_checkpoints *folder, struct pen_checkpoint_file *file,
			     struct pen_error *err);

/*
 * By rank 0, when all ranks have written: `files` are what they described, in their order. Each is
 * looked at again; what is not as described is an error. Then the manifest is written, durable
 * before this returns. `user` is a JSON object of the caller's own, or NULL. After an error the
 * step is still begun. Commit again if what was given was wrong; where the manifest could not be
 * made durable that is refused, -EIO: pen_checkpoints_abandon() the step and save it anew.
 */
int pen_checkpoints_commit(struct pen_checkpoints *folder,
			   const struct pen_checkpoint_file *files, size_t count, const char *user,
			   struct pen_error *err);

/* Remove what was written since pen_checkpoints_begin(): of this rank, or, by rank 0, of all. A
 * step that was to be replaced stays. */
int pen_checkpoints_abandon(struct pen_checkpoints *folder, struct pen_error *err);

/* By the other ranks, when they have described: what becomes of the step is rank 0's affair from
 * now on. Nothing is removed, whether it was committed or not: a network's file system may show
 * them too late that it was. */
int pen_checkpoints_leave(struct pen_checkpoints *folder, struct pen_error *err);

/* What verifying a step has found. */
struct pen_checkpoint_checked {
	size_t size;			/* sizeof(struct pen_checkpoint_checked) */
	uint64_t files;			/* that are as their rank described them */
	uint64_t bytes;			/* of these files */
	uint64_t verified;		/* bytes of storages that are as they were saved ... */
	uint64_t unverified;		/* ... and those that the files have no sums of */
};

#define PEN_CHECKPOINT_CHECKED_INIT PEN_SIZED_INIT(pen_checkpoint_checked)

/*
 * Read all of a step, by jobs with `options` (NULL is allowed): every file is the one that the
 * manifest means, and as it was saved. What is not is -EILSEQ or -EBADMSG, and the words name the
 * file, a tensor and the byte. `checked` may be NULL.
 */
int pen_checkpoints_verify(struct pen_checkpoints *folder, uint64_t step,
			   const struct pen_options *options,
			   struct pen_checkpoint_checked *checked, struct pen_error *err);

/* Is the file of a rank the one that the manifest means? By the table of its records: its bytes are
 * not read. -EILSEQ if it is another one, though that may be whole. For who reads it next. */
int pen_checkpoints_check(struct pen_checkpoints *folder, uint64_t step, uint32_t rank,
			  struct pen_error *err);

/* What was removed, or would be, and what stays though no step needs it. All names begin at the
 * folder: "step-00000100", "step-00000200/rank-00000.1.pt". */
struct pen_checkpoint_removal {
	const uint64_t *steps;		/* that do not exist any more */
	size_t step_count;
	const char *const *removed;
	size_t removed_count;
	const char *const *left;	/* not ours, or could not be removed */
	size_t left_count;
	uint64_t bytes;			/* of the files that were removed */
};

/* For the two below: remove nothing, tell what would be. */
#define PEN_CHECKPOINT_DRY_RUN 1u

/*
 * Remove the steps before the last `keep` (at least 1) that are whole; damaged ones among these do
 * not count, and go if they are older than all that are kept. Never the last whole step, nor one
 * that was begun. The manifest goes first, and durably. Files that are not Penstock's stay, and
 * their folder with them. By rank 0.
 */
int pen_checkpoints_gc(struct pen_checkpoints *folder, uint32_t keep, uint32_t flags,
		       struct pen_checkpoint_removal **removal, struct pen_error *err);

/*
 * Remove what a crash left: folders of steps that have no manifest, files in a step that its
 * manifest does not name, temporary files. By rank 0, whose lock says that nobody else writes;
 * where there are no locks all of it stays, and is told in `left`. Damaged steps are not touched.
 */
int pen_checkpoints_sweep(struct pen_checkpoints *folder, uint32_t flags,
			  struct pen_checkpoint_removal **removal, struct pen_error *err);

/* NULL is allowed. */
void pen_checkpoint_removal_free(struct pen_checkpoint_removal *removal);

/* ---------------------------------------------------------------------------- coded models -- */

/*
 * A model can be stored coded, without loss, in two thirds of its bytes: docs/coded.md has the
 * format. A coded file is a safetensors file, recognised by its metadata; pen_model_open() tells
 * of its tensors as they were, with `coded` set, and pen_load_start() loads them to any device, as
 * they were: a GPU decodes by itself, and where it cannot a core does and the report says why. A
 * load of coded tensors wants a memory limit of 256 KiB at least.
 */
struct pen_pack_options {
	size_t size;			/* sizeof(struct pen_pack_options) */
	uint64_t memory_limit;		/* most memory for bytes on their way; 0: 128 MiB */
	uint32_t threads;		/* at most 64; 0: as many as there are cores */
	int verify;			/* read back all that was packed, from its header on, and
					   compare the CRC32 of what it unpacks to */
};

#define PEN_PACK_OPTIONS_INIT PEN_SIZED_INIT(pen_pack_options)

struct pen_packed_kind {
	uint64_t tensors;
	uint64_t bytes, stored;		/* as they were, and in the coded file */
};

#define PEN_PACKED_KINDS 32

/* What has become of a file. */
struct pen_packed {
	size_t size;			/* sizeof(struct pen_packed) */
	int coded;			/* 0: it would not get smaller, and is as it was; or what
					   was to be unpacked was not packed */
	uint64_t bytes, stored;		/* of the original file and of the coded one */
	double seconds;
	struct pen_packed_kind kinds[PEN_PACKED_KINDS];	/* by enum pen_dtype */
};

#define PEN_PACKED_INIT PEN_SIZED_INIT(pen_packed)

struct pen_pack;

/*
 * Start to pack the safetensors file `path` into an object that is open for PEN_WRITE, its size not
 * given; or to unpack it again, to the byte. What is packed already is refused (-EINVAL); what is
 * not packed is unpacked by copying it. Nothing is committed: that is up to the caller, after
 * pen_pack_wait(). The object must live until then. Unpacking into no object (NULL) writes nothing:
 * it verifies that every chunk and the file as a whole are what was packed. A damaged one is named.
 */
int pen_pack_start(const char *path, struct pen_object *object,
		   const struct pen_pack_options *options, struct pen_pack **pack,
		   struct pen_error *err);
int pen_unpack_start(const char *path, struct pen_object *object,
		     const struct pen_pack_options *options, struct pen_pack **pack,
		     struct pen_error *err);

/*
 * As with jobs. Bytes are those of the original file, twice where they are verified, and once more
 * where it turns out that the file would not get smaller: `total` grows then.
 */
void pen_pack_poll(struct pen_pack *pack, struct pen_progress *progress);
void pen_pack_cancel(struct pen_pack *pack);
int pen_pack_wait_for(struct pen_pack *pack, double seconds);

/* Wait and release. `packed` may be NULL. After an error the object is not to be committed. */
int pen_pack_wait(struct pen_pack *pack, struct pen_packed *packed, struct pen_error *err);

/* --------------------------------------------------------------------------------- explain -- */

/* A stretch of a file that would travel one way. */
struct pen_range {
	uint64_t offset, length;
	uint64_t resident;	/* bytes of it in the page cache */
	char path[24];
	uint64_t reserved[2];
};

/* What the engine would do with a file on this machine. Release with pen_explain_free(). */
struct pen_explanation {
	uint64_t bytes;
	uint64_t resident;		/* in the page cache now */
	char filesystem[32];
	char store[64];			/* the block device or mount the knee is remembered for */
	uint32_t memory_alignment, offset_alignment;	/* of O_DIRECT; 0: not possible */
	char residency_by[24];		/* how residency was asked: cachestat, mincore, ... */
	char queue[24];			/* how direct requests would travel: uring, threads */
	char device[32];
	uint32_t lanes;
	uint64_t memory_limit;
	size_t range_count;
	struct pen_range *ranges;
	uint32_t path_count, refused_count;
	struct pen_path paths[PEN_PATHS_MAX];		/* bytes planned, and why */
	struct pen_path refused[PEN_PATHS_MAX];		/* each better path, why not, and the fix */
};

/* Of the object's bytes as they lie: those of coded tensors are decoded by a load, and may travel
 * otherwise then; the report of the load tells how. */
int pen_explain(struct pen_object *object, struct pen_device *device,
		const struct pen_options *options, struct pen_explanation **explanation,
		struct pen_error *err);
void pen_explain_free(struct pen_explanation *explanation);

/* ------------------------------------------------------------------------- words and names -- */

/* "AUTO", "GPU_DIRECT", ... for a type, NULL where there is none; gdsio's number of it, or -1. */
const char *pen_transfer_name(int type);
int pen_transfer_number(int type);

/* From "auto", "3", "CPU_ASYNC_GPU" or, as PyTorch's proposal spells the first seven,
 * "Storage->CPU->GPU_ASYNC" (any case); -EINVAL with the list in the error. */
int pen_transfer_parse(const char *text, int *type, struct pen_error *err);

/*
 * From people's words: "auto" is PEN_CACHE_AFTER_UNASKED, "keep", "after" and "drop" are what they
 * say, "off" is PEN_CACHE_AUTO. NULL, where they said nothing, is what the environment variable
 * PENSTOCK_CACHE says, and "auto" where it is not set or empty. -EINVAL with the list in the error.
 */
int pen_cache_parse(const char *text, int *cache, struct pen_error *err);

/* The paths there are, 0, 1, 2 ...: what reports call them and, in `what` (NULL is allowed), what
 * they are. NULL after the last. */
const char *pen_path_name(unsigned int number, const char **what);

/* Bytes of memory that may still be taken, for the page cache too, before somebody is hurt: the
 * machine's, or the least that a control group of the process has left. Without swap; UINT64_MAX
 * where nobody says. */
uint64_t pen_memory_available(void);

/* Give pooled staging memory back to the system. What was made together with memory that a job
 * uses stays; always safe. */
void pen_trim(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
