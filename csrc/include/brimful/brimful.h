#pragma once
// Everything that brimful offers to C++ programs but launch/checkpoint.h and sizer/batch_norms.h, which take more of torch
// in. Files that need one part compile faster with that part's header.
#include <brimful/error.h>
#include <brimful/launch/distributed_sampler.h>
#include <brimful/launch/init_from_env.h>
#include <brimful/launch/run_ranks.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/memory/system_limit.h>
#include <brimful/pipeline/peers.h>
#include <brimful/pipeline/pipeline.h>
#include <brimful/pipeline/schedules.h>
#include <brimful/pipeline/skip.h>
#include <brimful/reducer/distributed_data_parallel.h>
#include <brimful/sizer/autocast.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/sizer/map_batches.h>
#include <brimful/sizer/optimizer_bytes.h>
#include <brimful/sizer/verify_split.h>
#include <brimful/version.h>
