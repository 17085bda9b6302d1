"""The pipelines of diffusers that have no adapter here, each with the reason."""

from collections.abc import Mapping

from shared.models.plugins import known_pipelines

_BY_REASON: Mapping[str, str] = {
    "takes an image or a video besides the text, in a way that no adapter here knows": """
    AltDiffusionImg2Img AmusedImg2Img AmusedInpaint BlipDiffusion BlipDiffusionControlNet
    BriaFiboEdit ChromaImg2Img ChromaInpaint ChronoEdit CogVideoXFunControl CogVideoXImageToVideo
    CogVideoXVideoToVideo CogView4Control ConsisID Cosmos2VideoToWorld Cosmos2_5_Transfer
    Cosmos3Omni CosmosVideoToWorld CycleDiffusion EasyAnimateControl EasyAnimateInpaint
    Flux2KleinInpaint Flux2KleinKV FluxControl FluxControlImg2Img FluxControlInpaint
    FluxControlNet FluxControlNetImg2Img FluxControlNetInpaint FluxFill FluxImg2Img FluxInpaint
    FluxKontextInpaint FluxPriorRedux HunyuanDiTControlNet HunyuanImageRefiner
    HunyuanSkyreelsImageToVideo HunyuanVideo15ImageToVideo HunyuanVideoFramepack
    HunyuanVideoImageToVideo I2VGenXL IFImg2Img IFImg2ImgSuperResolution IFInpainting
    IFInpaintingSuperResolution IFSuperResolution JoyImageEdit JoyImageEditPlus Kandinsky3Img2Img
    Kandinsky5I2I Kandinsky5I2V Kandinsky6SR Kandinsky6TI2VA KandinskyImg2Img
    KandinskyImg2ImgCombined KandinskyInpaint KandinskyInpaintCombined KandinskyV22Controlnet
    KandinskyV22ControlnetImg2Img KandinskyV22Img2Img KandinskyV22Img2ImgCombined
    KandinskyV22Inpaint KandinskyV22InpaintCombined KolorsImg2Img LDMSuperResolution LTX2Condition
    LTX2DFR LTX2DFRTemporalRefine LTX2HDR LTX2ImageToVideo LTX2InContext LTX2LatentUpsample
    LTX2VideoDiffusionDecode LTXCondition LTXI2VLongMultiPrompt LTXImageToVideo LTXLatentUpsample
    LatentConsistencyModelImg2Img LongCatImageEdit LucyEdit MotifVideoImage2Video
    OnnxStableDiffusionImg2Img OnnxStableDiffusionInpaint OnnxStableDiffusionUpscale PIA
    PaintByExample QwenImageControlNet QwenImageControlNetInpaint
    QwenImageEditInpaint QwenImageEditPlus QwenImageImg2Img QwenImageInpaint QwenImageLayered
    SanaControlNet SanaImageToVideo SanaSprintImg2Img SanaWM
    SkyReelsV2DiffusionForcingImageToVideo SkyReelsV2DiffusionForcingVideoToVideo
    SkyReelsV2ImageToVideo StableDiffusion3ControlNet StableDiffusion3ControlNetInpainting
    StableDiffusion3Img2Img StableDiffusion3Inpaint StableDiffusion3PAGImg2Img
    StableDiffusionAdapter StableDiffusionControlNet StableDiffusionControlNetImg2Img
    StableDiffusionControlNetInpaint StableDiffusionControlNetPAG
    StableDiffusionControlNetPAGInpaint StableDiffusionControlNetXS StableDiffusionDepth2Img
    StableDiffusionDiffEdit StableDiffusionGLIGENTextImage StableDiffusionImageVariation
    StableDiffusionImg2Img StableDiffusionInpaint StableDiffusionInstructPix2Pix
    StableDiffusionLatentUpscale StableDiffusionPAGImg2Img StableDiffusionPAGInpaint
    StableDiffusionPix2PixZero StableDiffusionUpscale StableDiffusionXLAdapter
    StableDiffusionXLControlNet StableDiffusionXLControlNetImg2Img
    StableDiffusionXLControlNetInpaint StableDiffusionXLControlNetPAG
    StableDiffusionXLControlNetPAGImg2Img StableDiffusionXLControlNetUnion
    StableDiffusionXLControlNetUnionImg2Img StableDiffusionXLControlNetUnionInpaint
    StableDiffusionXLControlNetXS StableDiffusionXLImg2Img StableDiffusionXLInpaint
    StableDiffusionXLInstructPix2Pix StableDiffusionXLPAGImg2Img StableDiffusionXLPAGInpaint
    StableUnCLIPImg2Img StableVideoDiffusion UnCLIPImageVariation VersatileDiffusionDualGuided
    VersatileDiffusionImageVariation VideoToVideoSD VisualCloze VisualClozeGeneration WanAnimate
    WanVACE WanVideoToVideo ZImageControlNet ZImageControlNetInpaint ZImageImg2Img
    ZImageInpaint ZImageOmni
    """,
    "has no adapter here (CONTRIBUTING.md says how to add a family in two files)": """
    AnyFlow AnyFlowFAR AuraFlow Bria BriaFibo BriaFibo2 Chroma CogView4 Cosmos2TextToImage
    Cosmos2_5_PredictBase CosmosTextToWorld DreamLite DreamLiteMobile EasyAnimate ErnieImage
    GlmImage Helios HiDreamImage HunyuanImage Ideogram4 Kandinsky5T2I Kandinsky5T2V
    Krea2 LTX LongCatImage Lumina2 Mochi MotifVideo NucleusMoEImage OmniGen OvisImage PRX
    PRXPixel QwenImage21 Sana SanaPAG SanaSprint SanaVideo SkyReelsV2 SkyReelsV2DiffusionForcing
    StableDiffusion3PAG
    """,
    "predicts noise or tokens, and what is trained here are the velocities of flow matching": """
    Allegro AltDiffusion Amused AnimateDiff AnimateDiffControlNet AnimateDiffPAG AnimateDiffSDXL
    AnimateDiffSparseControlNet AnimateDiffVideoToVideo AnimateDiffVideoToVideoControlNet
    CogVideoX CogView3Plus HunyuanDiT HunyuanDiTPAG Kolors KolorsPAG LDMTextToImage
    LatentConsistencyModel Latte Lumina OnnxStableDiffusion PixArtAlpha PixArtSigma PixArtSigmaPAG
    SemanticStableDiffusion StableDiffusion StableDiffusionAttendAndExcite StableDiffusionGLIGEN
    StableDiffusionLDM3D StableDiffusionModelEditing StableDiffusionOnnx StableDiffusionPAG
    StableDiffusionPanorama StableDiffusionParadigms StableDiffusionSAG StableDiffusionXL
    StableDiffusionXLPAG StableUnCLIP TextToVideoSD TextToVideoZero TextToVideoZeroSDXL UnCLIP
    VQDiffusion VersatileDiffusion VersatileDiffusionTextToImage
    """,
    "is made of several diffusion models in turn, and one is trained here": """
    HeliosPyramid IF Kandinsky Kandinsky3 KandinskyCombined KandinskyPrior KandinskyV22
    KandinskyV22Combined KandinskyV22Prior KandinskyV22PriorEmb2Emb StableCascadeCombined
    StableCascadeDecoder StableCascadePrior WuerstchenCombined WuerstchenDecoder WuerstchenPrior
    """,
    "makes something else than images and videos from a text": """
    AceStep AudioDiffusion AudioLDM AudioLDM2 ConsistencyModel DDIM DDPM DanceDiffusion DiT
    DiffusionGemma KarrasVe LDM LLaDA2 LongCatAudioDiT MarigoldDepth MarigoldIntrinsics
    MarigoldNormals MusicLDM PNDM RFD4Proteina RePaint ScoreSdeVe ShapE ShapEImg2Img
    SpectrogramDiffusion StableAudio StableAudio3 StableAudio3AudioToAudio StableAudio3Inpaint
    UniDiffuser
    """,
    "is a modular pipeline, which has no folder with all its parts": """
    AnimaModular Cosmos3DistilledModular Cosmos3OmniModular EchoModular ErnieImageModular
    Flux2KleinBaseModular Flux2KleinModular Flux2Modular Flux3DistilledModular Flux3Modular
    FluxKontextModular FluxModular HeliosModular HeliosPyramidDistilledModular
    HeliosPyramidModular HunyuanVideo15Modular Ideogram4Modular Krea2Modular Krea2TurboModular
    LTX25Modular LTX2Modular LTXModular MiniMaxH3Modular MiniMaxMusic3Modular QwenImage21Modular
    QwenImage21TurboModular QwenImageEditModular QwenImageEditPlusModular QwenImageLayeredModular
    QwenImageModular StableDiffusion3Modular StableDiffusionXLModular Wan22Image2VideoModular
    Wan22Modular Wan22VaceModular WanAnimate2DistilledModular WanAnimate2Modular
    WanImage2VideoModular WanModular ZImageModular
    """,
}
"""Reason -> names of pipelines, without "Pipeline" at their ends."""

REFUSED: Mapping[str, str] = {
    f"{name}Pipeline": reason for reason, names in _BY_REASON.items() for name in names.split()
}
"""Reason by the name of the pipeline."""


def unsupported(pipeline: str) -> str:
    """Return the explanation for a pipeline without an adapter: why, and which pipelines have
    one."""
    reason, names = REFUSED.get(pipeline), ", ".join(known_pipelines())
    because = "" if reason is None else f", which {reason}"
    return f"a {pipeline}{because}; supported are: {names}"
